"""A rank's place in its tensor-parallel group, and how the model talks to the group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from leadline.engine.errors import ConfigError
from leadline.engine.models.config import ModelConfig

__all__ = ["SINGLE", "TensorParallel", "check_divisible"]


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(slots=True, frozen=True)
class TensorParallel:
    """Rank `rank` of `size`. The collectives are injected by the runner; for one rank they do nothing."""

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[torch.Tensor], torch.Tensor] = _identity
    """Sum over ranks, [T, hidden] → the same shape; may work in place, the caller uses the result only."""
    all_gather: Callable[[torch.Tensor], torch.Tensor] = _identity
    """[R, n] of each rank → [R, size * n], ranks side by side in order."""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(f"tensor-parallel rank {self.rank} does not exist among {self.size}")
        if self.size > 1 and _identity in (self.all_reduce, self.all_gather):
            raise ConfigError("more than one tensor-parallel rank needs all_reduce and all_gather")

    def kv_heads(self, total: int) -> tuple[int, int]:
        """(first KV head, number of KV heads) of this rank.

        total >= size:  ranks  0 1 2 3   heads  01 23 45 67
        total <  size:  ranks  0 1 2 3   heads  0  0  1  1     replicated
        """
        if total >= self.size:
            count = total // self.size
            return self.rank * count, count
        return self.rank * total // self.size, 1


SINGLE = TensorParallel()


def check_divisible(config: ModelConfig, size: int) -> None:
    """Raise ConfigError unless the model splits over `size` ranks. The vocabulary, padded, always does."""
    for name, value in (
        ("num_attention_heads", config.num_heads),
        ("intermediate_size", config.intermediate_size),
    ):
        if value % size:
            raise ConfigError(f"tensor_parallel {size} does not divide {name} {value}{_hint(config)}")
    kv = config.num_kv_heads
    if kv % size and size % kv:
        raise ConfigError(
            f"tensor_parallel {size} neither divides num_key_value_heads {kv} nor is a multiple of it"
            + _hint(config)
        )


def _hint(config: ModelConfig) -> str:
    def works(size: int) -> bool:
        kv = config.num_kv_heads
        fits = config.num_heads % size == 0 and config.intermediate_size % size == 0
        return fits and (kv % size == 0 or size % kv == 0)

    return f"; for this model 1 to 16 may be {', '.join(str(size) for size in range(1, 17) if works(size))}"
