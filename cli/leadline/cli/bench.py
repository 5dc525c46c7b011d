"""`leadline bench serve`: load on a running server, and what its clients see of it. (`leadline bench routing`
is routing/'s, `leadline bench matrix` is matrix/'s.)

Closed loop (`--concurrency` clients, each with one request at a time) or open loop (`--rate` requests per
second, Poisson arrivals). Prompts are random words, cut to length by the server's own tokenizer (a gateway
shows none: there as many words), so that nothing but `--prefix-tokens` is shared. Times are the client's:
TTFT from the first byte sent to the first event with a token, ITL between events.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from leadline.cli import matrix, routing
from leadline.cli.http import Server, ServerError
from leadline.cli.routing.conversations import WORDS
from leadline.cli.sse import post_events

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    routing.add_arguments(
        what.add_parser("routing", help="compare routing policies on real engines", allow_abbrev=False)
    )
    matrix.add_arguments(
        what.add_parser("matrix", help="measure each technique of the engine, on and off", allow_abbrev=False)
    )
    serve = what.add_parser("serve", help="load a running server", allow_abbrev=False)
    serve.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    serve.add_argument("--model", help="model name; the server's own when left out")
    serve.add_argument(
        "--requests", type=int, default=100, metavar="N", help="how many (default: %(default)s)"
    )
    serve.add_argument(
        "--concurrency", type=int, default=8, metavar="N", help="requests in flight (default: %(default)s)"
    )
    serve.add_argument(
        "--rate", type=float, metavar="X", help="requests per second, at random times; ignores --concurrency"
    )
    serve.add_argument(
        "--prompt-tokens",
        type=int,
        default=128,
        metavar="N",
        help="length of a prompt (default: %(default)s)",
    )
    serve.add_argument(
        "--prefix-tokens",
        type=int,
        default=0,
        metavar="N",
        help="of these, the same in all (default: %(default)s)",
    )
    serve.add_argument(
        "--output-tokens",
        type=int,
        default=64,
        metavar="N",
        help="length of an answer (default: %(default)s)",
    )
    serve.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals")
    serve.add_argument("--json", action="store_true", help="print one JSON object")
    serve.add_argument("--api-key", help="API key (default: the environment variable LEADLINE_API_KEY)")


def run(args: argparse.Namespace) -> int:
    if args.what == "routing":
        return routing.run(args)
    if args.what == "matrix":
        return matrix.run(args)
    for name in ("requests", "concurrency", "prompt_tokens", "output_tokens"):
        if getattr(args, name) < 1:
            raise ServerError(f"--{name.replace('_', '-')} must be at least 1")
    if args.prefix_tokens < 0:
        raise ServerError("--prefix-tokens must not be negative")
    if args.rate is not None and not 0 < args.rate < math.inf:
        raise ServerError(f"--rate must be a positive number of requests per second, not {args.rate}")
    key = args.api_key or os.environ.get("LEADLINE_API_KEY")
    server = Server(args.url, api_key=key)
    model = args.model or server.model()
    result = _summary(*asyncio.run(_load(args, key, model, _prompts(server, args))))
    if args.json:
        print(json.dumps(result))
    else:
        _print(result)
    return 0 if result["failed"] == 0 else 1


@dataclass(slots=True)
class _Request:
    """What one request saw. Seconds."""

    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)
    total: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


_Prompt = list[int] | str


def _prompts(server: Server, args: argparse.Namespace) -> Sequence[_Prompt]:
    try:
        return _exact_prompts(server, args)
    except ServerError as error:
        if error.status != 404:
            raise
    # A gateway has no /tokenize. These words are a token each for most tokenizers, and the result has the
    # true numbers.
    print("no /tokenize there: prompts of as many words as --prompt-tokens says", file=sys.stderr)
    rng = random.Random(args.seed)
    shared = rng.choices(WORDS, k=min(args.prefix_tokens, args.prompt_tokens))
    rest = args.prompt_tokens - len(shared)
    return [" ".join([*shared, *rng.choices(WORDS, k=rest)]) for _ in range(args.requests)]


def _exact_prompts(server: Server, args: argparse.Namespace) -> list[list[int]]:
    rng = random.Random(args.seed)

    def tokens(count: int) -> list[int]:
        # A word is at least one token, mostly; ask again for what is missing.
        ids: list[int] = []
        while len(ids) < count:
            text = " ".join(rng.choices(WORDS, k=count - len(ids) + 8))
            body = {"prompt": " " + text, "add_special_tokens": False}
            ids += server.post("/tokenize", body, "tokens")["tokens"]
        return ids[:count]

    shared = tokens(min(args.prefix_tokens, args.prompt_tokens))
    return [shared + tokens(args.prompt_tokens - len(shared)) for _ in range(args.requests)]


async def _load(
    args: argparse.Namespace, key: str | None, model: str, prompts: Sequence[_Prompt]
) -> tuple[list[_Request], float]:
    rng = random.Random(args.seed + 1)
    gate = asyncio.Semaphore(args.requests if args.rate else args.concurrency)

    async def one(prompt: _Prompt) -> _Request:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": args.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with gate:
            return await _measure(post_events(args.url, "/v1/completions", body, key))

    began = time.perf_counter()
    tasks = []
    for prompt in prompts:
        tasks.append(asyncio.ensure_future(one(prompt)))
        if args.rate:
            await asyncio.sleep(rng.expovariate(args.rate))
    return list(await asyncio.gather(*tasks)), time.perf_counter() - began


async def _measure(events: AsyncIterator[dict[str, Any]]) -> _Request:
    seen = _Request()
    began = last = time.perf_counter()
    try:
        async for event in events:
            now = time.perf_counter()
            if usage := event.get("usage"):
                seen.prompt_tokens = usage["prompt_tokens"]
                seen.output_tokens = usage["completion_tokens"]
                seen.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            if not event["choices"]:
                continue
            if not seen.ttft:
                seen.ttft = now - began
            else:
                seen.gaps.append(now - last)
            last = now
    except (OSError, EOFError, ServerError, ValueError) as error:
        seen.error = str(error) or type(error).__name__
    seen.total = last - began
    return seen


def _summary(requests: list[_Request], seconds: float) -> dict[str, Any]:
    good = [request for request in requests if request.error is None]
    output = sum(request.output_tokens for request in good)
    prompt = sum(request.prompt_tokens for request in good)
    return {
        "completed": len(good),
        "failed": len(requests) - len(good),
        "errors": sorted({request.error for request in requests if request.error is not None}),
        "seconds": seconds,
        "prompt_tokens": prompt,
        "cached_tokens": sum(request.cached_tokens for request in good),
        "output_tokens": output,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": output / seconds,
        "total_tokens_per_second": (prompt + output) / seconds,
        "ttft_seconds": _spread([request.ttft for request in good]),
        "itl_seconds": _spread([gap for request in good for gap in request.gaps]),
        "request_seconds": _spread([request.total for request in good]),
    }


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}
    ordered = sorted(values)

    def at(share: float) -> float:
        """Nearest rank."""
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {"mean": sum(ordered) / len(ordered), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99)}


def _print(result: dict[str, Any]) -> None:
    print(f"{result['completed']} requests in {result['seconds']:.1f} s, {result['failed']} failed")
    for error in result["errors"]:
        print(f"  failed: {error}")
    print(f"{result['output_tokens_per_second']:.1f} output tokens/s")
    print(
        f"{result['total_tokens_per_second']:.1f} tokens/s with prompts, of which "
        f"{result['cached_tokens']} of {result['prompt_tokens']} tokens were cached"
    )
    for name, label in (("ttft_seconds", "TTFT"), ("itl_seconds", "ITL"), ("request_seconds", "request")):
        row = "  ".join(f"{key} {value * 1000:.1f}" for key, value in result[name].items())
        print(f"{label:>8} ms: {row}")
