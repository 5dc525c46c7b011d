"""Prompts as token ids, seeded, each with an output length."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["WORKLOADS", "Size", "Work", "make"]

WORKLOADS = {
    "shared prefix": "all requests at once; half of each prompt is the same in all",
    "copying": "one request at a time; the prompt is a passage three times over, which answers go on copying",
}


@dataclass(slots=True, frozen=True)
class Size:
    requests: int
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True, frozen=True)
class Work:
    prompts: list[list[int]]
    output_tokens: int
    together: bool
    """All at once, or one after the other."""


def make(name: str, size: Size, vocab_size: int, seed: int | str) -> Work:
    """Another seed gives other prompts: a warm run must not find an earlier one's prefixes."""
    rng = random.Random(f"{name} {seed}")

    def tokens(count: int) -> list[int]:
        return [rng.randrange(256, min(vocab_size, 40_000)) for _ in range(count)]

    if name == "shared prefix":
        shared = tokens(size.prompt_tokens // 2)
        own = size.prompt_tokens - len(shared)
        return Work([shared + tokens(own) for _ in range(size.requests)], size.output_tokens, True)
    prompts = []
    for _ in range(max(1, min(4, size.requests // 4))):
        passage = tokens(max(4, size.prompt_tokens // 6))
        prompts.append(passage * 3)
    return Work(prompts, size.output_tokens, False)
