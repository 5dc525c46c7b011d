"""The prompts and output lengths that every engine on a GPU is given."""

from __future__ import annotations

import random

__all__ = ["workload"]


def workload(name: str, requests: int, longest: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths. "A" draws as nano-vllm's own benchmark does; bs1, bs32, ...: 128 tokens in,
    256 out; bs256x512: 512 out."""
    rng = random.Random(0)
    if name == "A":
        prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, longest))] for _ in range(requests)]
        return prompts, [rng.randint(100, longest) for _ in range(requests)]
    batch, _, output = name.removeprefix("bs").partition("x")
    count = min(int(batch), requests)
    return [[rng.randint(0, 10000) for _ in range(128)] for _ in range(count)], [int(output or 256)] * count
