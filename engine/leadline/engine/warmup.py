"""Prompts into the prefix cache, before anybody asks for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leadline.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from leadline.engine.async_engine import AsyncEngine

__all__ = ["WarmupReport", "warm_up"]


@dataclass(slots=True)
class WarmupReport:
    prompts: int
    prompt_tokens: int
    cached_tokens: int
    """Tokens that were in the cache already."""
    seconds: float


async def warm_up(
    engine: AsyncEngine, prompts: Sequence[str | Sequence[int]], cache_salt: str
) -> WarmupReport:
    """One greedy token of each, half as many at once as the engine runs."""
    began = time.monotonic()
    gate = asyncio.Semaphore(max(1, engine.config.max_concurrent_requests // 2))
    sampling = SamplingParams(max_tokens=1, temperature=0.0)

    async def one(prompt: str | Sequence[int]) -> tuple[int, int]:
        async with gate:
            tokens = cached = 0
            async for delta in engine.generate(
                prompt, sampling, priority_class="batch", cache_salt=cache_salt
            ):
                tokens, cached = delta.num_prompt_tokens, delta.num_cached_tokens
            return tokens, cached

    tasks = [asyncio.ensure_future(one(prompt)) for prompt in prompts]
    try:
        counts = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return WarmupReport(
        prompts=len(counts),
        prompt_tokens=sum(tokens for tokens, _ in counts),
        cached_tokens=sum(cached for _, cached in counts),
        seconds=time.monotonic() - began,
    )
