"""`leadline bench routing`: what prefix routing is worth, with real engines on this machine.

Starts engines once; then, for each policy in turn, empties their prefix caches, puts a gateway with that
policy in front and holds the same seeded conversations. With `--rounds 2` the policies run again in the
opposite order with other conversations, so that neither has the better place. The engines' CPU seconds stand
beside the times: other work on the machine does not change them.

The ceiling it prints is the hit rate of one cache that all engines share and that forgets nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leadline.cli.conversations import Turn, Workload, hold
from leadline.cli.http import Server, ServerError
from leadline.cli.options import add_engine_options
from leadline.engine.errors import ConfigError

if TYPE_CHECKING:
    from leadline.cli.launcher import Stack

__all__ = ["add_arguments", "run"]

_WARM_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2", help="model (default: %(default)s)")
    group = parser.add_argument_group("benchmark settings")
    group.add_argument(
        "--replicas", type=int, default=3, metavar="N", help="engines to run (default: %(default)s)"
    )
    group.add_argument(
        "--policies",
        default="random,prefix",
        metavar="NAME,...",
        help="routing policies, the first is what the others are compared with (default: %(default)s)",
    )
    group.add_argument(
        "--rounds", type=int, default=2, metavar="N", help="times each policy runs (default: %(default)s)"
    )
    defaults = Workload()
    for name, text in (
        ("systems", "system prompts"),
        ("system_words", "words in each system prompt"),
        ("conversations", "conversations a run"),
        ("turns", "turns of a conversation"),
        ("user_words", "words of each question"),
        ("output_tokens", "tokens of each answer"),
        ("clients", "conversations held at the same time"),
    ):
        option = f"--{name.replace('_', '-')}"
        default = getattr(defaults, name)
        group.add_argument(
            option, type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    group.add_argument(
        "--workload-seed", type=int, default=0, metavar="N", help="of the conversations (default: 0)"
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write all results there as one object")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    from leadline.cli.launcher import EngineSettings, StackSettings

    numbers = [field.name for field in dataclasses.fields(Workload) if field.name != "seed"]
    for name in (*numbers, "replicas", "rounds"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{name} must be at least 1, not {getattr(args, name)}")
    policies = [name.strip() for name in args.policies.split(",") if name.strip()]
    if not policies or len(set(policies)) < len(policies):
        raise ConfigError("policies must be different names with commas between them, such as random,prefix")
    workload = Workload(**{name: getattr(args, name) for name in numbers}, seed=args.workload_seed)
    settings = StackSettings(
        engines=EngineSettings.of(args.model, args), replicas=args.replicas, port=0, drain_timeout=2.0
    )
    result = asyncio.run(_measure(settings, workload, policies, args.rounds))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    _print(result)
    return 0 if not any(row["failed"] for row in result["policies"].values()) else 1


@dataclasses.dataclass(slots=True)
class _Run:
    """One policy in one round."""

    turns: list[Turn]
    seconds: float
    cpu_seconds: float
    """Of all engines."""


async def _measure(settings: Any, workload: Workload, policies: Sequence[str], rounds: int) -> dict[str, Any]:
    from leadline.cli.launcher import Stack

    stack = Stack(settings, lambda line: print(line, file=sys.stderr, flush=True))
    runs: dict[str, list[_Run]] = {policy: [] for policy in policies}
    try:
        await stack.start_engines()
        engines = [Server(url) for url in stack.engine_urls]
        await asyncio.to_thread(_warm, engines, stack.served_name)
        for number in range(rounds):
            load = dataclasses.replace(workload, seed=workload.seed + number)
            for policy in policies if number % 2 == 0 else reversed(policies):
                for engine in engines:
                    await asyncio.to_thread(engine.post, "/admin/reset_prefix_cache", {})
                await stack.start_gateway(policy)
                await asyncio.to_thread(_wait_exact, stack)
                before = _cpu_seconds(stack)
                turns, seconds = await hold(stack.url, stack.served_name, load)
                runs[policy].append(_Run(turns, seconds, _cpu_seconds(stack) - before))
                print(f"round {number + 1}, {policy}: {len(turns)} requests in {seconds:.1f} s", flush=True)
        await stack.stop_gateway()
        ceiling = await asyncio.to_thread(_ceiling, engines[0], [one.turns for one in runs[policies[0]]])
    finally:
        await stack.stop()
    return {
        "model": stack.served_name,
        "replicas": settings.replicas,
        "rounds": rounds,
        "engine_options": dict(settings.engines.options),
        "workload": dataclasses.asdict(workload),
        "ceiling_hit_rate": ceiling,
        "policies": {policy: _summary(found) for policy, found in runs.items()},
    }


def _warm(engines: Sequence[Server], model: str) -> None:
    """Every engine computes a prompt and some tokens, so that none is slow at first."""
    for engine in engines:
        engine.post(
            "/v1/completions", {"model": model, "prompt": "warm " * 200, "max_tokens": 8, "temperature": 0}
        )


def _cpu_seconds(stack: Stack) -> float:
    """CPU time that the engines have used, their core processes included."""
    import psutil

    total = 0.0
    for engine in stack.engines:
        top = psutil.Process(engine.pid)
        for process in (top, *top.children(recursive=True)):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _wait_exact(stack: Stack) -> None:
    """Until the gateway routes by tokens: its tokenizer is loaded, and it has heard of its pods."""
    body = {"model": stack.served_name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    ends = time.monotonic() + _WARM_SECONDS
    while True:
        request = urllib.request.Request(
            f"{stack.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-Leadline-Explain": "1"},
        )
        with urllib.request.urlopen(request, timeout=_WARM_SECONDS) as answer:
            if json.loads(answer.headers["X-Leadline-Explain"])["exact"]:
                return
        if time.monotonic() > ends:
            raise ServerError(f"the gateway did not load its tokenizer within {_WARM_SECONDS:.0f} s")
        time.sleep(0.1)


def _ceiling(engine: Server, rounds: Sequence[Sequence[Turn]]) -> float:
    """The share of prompt tokens in blocks that some request before had, its answer included, in the order in
    which they were sent."""
    card = engine.get("/v1/models")["data"][0]
    block_size = card["prefix_chain"]["block_size"] if card.get("prefix_chain") else 64
    found = total = 0
    for turns in rounds:
        seen: set[tuple[int, ...]] = set()
        for turn in turns:
            ids = engine.post("/tokenize", {"messages": turn.messages})["tokens"]
            answered = [*turn.messages, {"role": "assistant", "content": turn.answer}]
            after = engine.post("/tokenize", {"messages": answered, "add_generation_prompt": False})["tokens"]
            # The KV of the last token of an answer is never computed.
            after = after[: len(ids) + turn.output_tokens - 1]
            # A fully cached prompt still computes its last block.
            usable = _prefixes(ids[:-1], block_size)
            total += len(ids)
            found += block_size * next(
                (place for place, prefix in enumerate(usable) if prefix not in seen), len(usable)
            )
            seen.update(_prefixes(ids, block_size), _prefixes(after, block_size))
    return found / total


def _prefixes(ids: list[int], block_size: int) -> list[tuple[int, ...]]:
    """What ends with each full block."""
    return [tuple(ids[:end]) for end in range(block_size, len(ids) + 1, block_size)]


def _summary(runs: Sequence[_Run]) -> dict[str, Any]:
    turns = [turn for one in runs for turn in one.turns]
    good = [turn for turn in turns if turn.error is None]
    if not good:
        raise ServerError(f"no request was answered: {turns[0].error}")
    seconds = sum(one.seconds for one in runs)
    prompt = sum(turn.prompt_tokens for turn in good)
    output = sum(turn.output_tokens for turn in good)
    pods = [turn.pod for turn in good]
    return {
        "requests": len(turns),
        "failed": len(turns) - len(good),
        "errors": sorted({turn.error for turn in turns if turn.error is not None}),
        "seconds": seconds,
        "prompt_tokens": prompt,
        "hit_rate": sum(turn.cached_tokens for turn in good) / prompt,
        "ttft_seconds": _spread([turn.ttft for turn in good]),
        "first_turn_ttft_seconds": _spread([turn.ttft for turn in good if turn.number == 0]),
        "later_turn_ttft_seconds": _spread([turn.ttft for turn in good if turn.number > 0]),
        "requests_per_second": len(good) / seconds,
        "tokens_per_second": (prompt + output) / seconds,
        "requests_by_pod": {pod: pods.count(pod) for pod in sorted(set(pods))},
        "engine_cpu_seconds_per_request": sum(one.cpu_seconds for one in runs) / len(turns),
        "round_seconds": [one.seconds for one in runs],
    }


def _spread(values: list[float]) -> dict[str, float]:
    """Mean, and percentiles by nearest rank."""
    if not values:
        return {"mean": 0.0, "p50": 0.0, "p90": 0.0}
    ordered = sorted(values)
    at = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in _SHARES.items()}
    return {"mean": sum(ordered) / len(ordered), **at}


_SHARES = {"p50": 0.5, "p90": 0.9}


def _print(result: dict[str, Any]) -> None:
    workload, rows = result["workload"], result["policies"]
    base = next(iter(rows.values()))
    print(
        f"\n{result['model']} × {result['replicas']}; {result['rounds']} × {workload['conversations']} "
        f"conversations of {workload['turns']} turns over {workload['systems']} system prompts, "
        f"{workload['clients']} at a time; {base['prompt_tokens'] / base['requests']:.0f} prompt tokens and "
        f"{workload['output_tokens']} output tokens a request.\n"
        f"{result['ceiling_hit_rate']:.1%} of the prompt tokens were sent before: no policy can hit more.\n"
    )
    print(
        f"{'policy':<12}{'hit rate':>9}{'TTFT mean':>12}{'p50':>10}{'p90':>10}"
        f"{'requests/s':>12}{'tokens/s':>10}{'CPU s/request':>15}"
    )
    for policy, row in rows.items():
        ttft = row["ttft_seconds"]
        times = "".join(
            f"{ttft[key] * 1000:>{width}.0f} ms" for key, width in (("mean", 9), ("p50", 7), ("p90", 7))
        )
        print(
            f"{policy:<12}{row['hit_rate']:>9.1%}{times}"
            f"{row['requests_per_second']:>12.2f}{row['tokens_per_second']:>10.0f}"
            f"{row['engine_cpu_seconds_per_request']:>15.3f}"
        )
        for error in row["errors"]:
            print(f"  failed: {error}")
    for policy, row in list(rows.items())[1:]:
        ttft = row["ttft_seconds"]["mean"] / base["ttft_seconds"]["mean"]
        rate = row["requests_per_second"] / base["requests_per_second"]
        print(f"\n{policy} over {next(iter(rows))}: mean TTFT × {ttft:.2f}, requests/s × {rate:.2f}")
