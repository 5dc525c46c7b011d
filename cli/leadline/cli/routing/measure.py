"""Runs the policies: engines once; then, for each policy in turn, empties their prefix caches, puts a gateway
with that policy in front and holds the same seeded conversations.

Further rounds have other conversations, and the policies in the opposite order, so that none has the better
place.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
import urllib.request
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from leadline.cli.http import Server, ServerError
from leadline.cli.routing.ceiling import ceiling_hit_rate
from leadline.cli.routing.conversations import WORDS, Workload, hold
from leadline.cli.routing.own_time import read_times
from leadline.cli.routing.table import Run, summary
from leadline.engine.config import EngineConfig

if TYPE_CHECKING:
    from leadline.cli.launcher import Stack, StackSettings

__all__ = ["measure"]

_WARM_SECONDS = 60.0
_WARM_SEED = 1 << 32


async def measure(
    settings: StackSettings, workload: Workload, policies: Sequence[str], rounds: int, warm_up: int
) -> dict[str, Any]:
    """Everything, as it goes into a JSON file. `warm_up`: conversations that are held first and not counted.

    Raises LaunchError, ServerError.
    """
    from leadline.cli.launcher import Stack

    stack = Stack(settings, lambda line: print(line, file=sys.stderr, flush=True))
    runs: dict[str, list[Run]] = {policy: [] for policy in policies}
    try:
        await stack.start_engines()
        await stack.start_gateway(policies[0])
        await asyncio.to_thread(_warm, stack)
        if warm_up:
            warm = dataclasses.replace(workload, conversations=warm_up, turns=2, seed=_WARM_SEED)
            await hold(stack.url, stack.served_name, warm)
        for number in range(rounds):
            load = dataclasses.replace(workload, seed=workload.seed + number)
            for policy in policies if number % 2 == 0 else reversed(policies):
                run = await _run(stack, policy, load)
                runs[policy].append(run)
                print(
                    f"round {number + 1}, {policy}: {len(run.turns)} requests in {run.seconds:.1f} s",
                    file=sys.stderr,
                    flush=True,
                )
    finally:
        await stack.stop()
    block_size = settings.engines.options.get("block_size", EngineConfig(model="").block_size)
    first = [one.turns for one in runs[policies[0]]]
    return {
        "model": stack.served_name,
        "replicas": settings.replicas,
        "rounds": rounds,
        "engine_options": dict(settings.engines.options),
        "workload": dataclasses.asdict(workload),
        "ceiling_hit_rate": ceiling_hit_rate(settings.engines.folder, block_size, first),
        "policies": {policy: summary(found) for policy, found in runs.items()},
    }


async def _run(stack: Stack, policy: str, load: Workload) -> Run:
    await stack.stop_gateway()
    for url in stack.engine_urls:
        await asyncio.to_thread(Server(url).post, "/admin/reset_prefix_cache", {}, "blocks")
    await stack.start_gateway(policy)
    await asyncio.to_thread(_wait_exact, stack)
    before = await asyncio.to_thread(read_times, stack.url, stack.engine_urls)
    cpu, own = _cpu_seconds(stack), time.process_time()
    turns, seconds = await hold(stack.url, stack.served_name, load)
    cpu, own = _cpu_seconds(stack) - cpu, time.process_time() - own
    after = await asyncio.to_thread(read_times, stack.url, stack.engine_urls)
    return Run(turns, seconds, cpu, own, (before, after))


def _warm(stack: Stack) -> None:
    """Every engine computes a prompt and some tokens, so that none is slow at first."""
    body = {"model": stack.served_name, "prompt": " ".join(WORDS * 4), "max_tokens": 8, "temperature": 0}
    for url in stack.engine_urls:
        Server(url).post("/v1/completions", body, "choices")


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
    """Wait until the gateway routes by tokens: its tokenizer is loaded, and it knows its pods."""
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
