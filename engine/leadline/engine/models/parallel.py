"""A rank's place in its tensor-parallel group, and how the model talks to the group."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from leadline.engine.errors import ConfigError
from leadline.engine.models.config import ModelConfig

__all__ = ["SINGLE", "Fabric", "Part", "Sum", "TensorParallel", "check_split", "split_heads"]


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(slots=True, frozen=True)
class Part:
    """A rank's part of `total` things.

    of all    | ... | start .. start + filled | ... |
    here            | filled                  | zeros |
                    |<-------- count ---------------->|
    """

    total: int
    start: int
    filled: int
    count: int
    """The same on every rank."""

    def times(self, size: int) -> Part:
        """The same part of things `size` times as many."""
        return Part(self.total * size, self.start * size, self.filled * size, self.count * size)


class Sum(enum.Enum):
    """A sum over ranks of a step, by who makes its terms. They alternate: none comes twice in a row."""

    O = "o"  # noqa: E741 - the projection's name
    DOWN = "down"
    EMBEDDING = "embedding"


class Fabric(Protocol):
    """Sums over ranks through memory that all of them can address, fused with what follows the sum.

    A rank puts its terms, [rows, hidden], where `partial` says, and then calls one of the others.
    """

    def partial(self, which: Sum, rows: int) -> torch.Tensor | None:
        """Where the terms go; None if there are too many rows."""

    def sum(self, which: Sum, rows: int) -> torch.Tensor:
        """The sum, a new tensor."""

    def add(self, which: Sum, residual: torch.Tensor) -> None:
        """residual [rows, hidden] += the sum."""

    def add_rms_norm(
        self,
        which: Sum,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """residual += the sum; rms_norm(residual) * weight. A rank may keep only some of residual's rows up
        to date: those it will need in the next call, which must have as many rows."""

    def logits_part(self, rows: int) -> torch.Tensor | None:
        """Where a rank puts its columns of the logits, [rows, ceil(vocab / ranks)], for the next
        `gather_logits`; None: too many rows."""

    def gather_logits(self, rows: int, out: torch.Tensor | None) -> torch.Tensor:
        """[rows, vocab] of all ranks, in `out` if it is given."""

    def abort(self) -> None:
        """Make kernels that wait for another rank stop waiting. For any thread; final."""


@dataclass(slots=True, frozen=True)
class TensorParallel:
    """Rank `rank` of `size`. The collectives are injected by the runner; for one rank they do nothing."""

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[torch.Tensor], torch.Tensor] = _identity
    """Sum over ranks, [T, hidden] → the same shape; may work in place, the caller uses the result only."""
    all_gather: Callable[[torch.Tensor], torch.Tensor] = _identity
    """[R, n] of each rank → [R, size * n], ranks side by side in order."""
    fabric: Fabric | None = None
    """The faster way, where there is one; the two above work for any size."""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(f"tensor-parallel rank {self.rank} does not exist among {self.size}")
        if self.size > 1 and _identity in (self.all_reduce, self.all_gather):
            raise ConfigError("more than one tensor-parallel rank needs all_reduce and all_gather")

    def share(self, total: int) -> Part:
        """This rank's part of `total` rows, columns or KV heads: equal parts, the last ones padded."""
        return _share(self.rank, self.size, total)

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[Part, Part]:
        """Query heads and KV heads of this rank."""
        return split_heads(self.rank, self.size, num_heads, num_kv_heads)


SINGLE = TensorParallel()


def _share(rank: int, size: int, total: int) -> Part:
    count = -(-total // size)
    start = min(rank * count, total)
    return Part(total, start, min(count, total - start), count)


def split_heads(rank: int, size: int, num_heads: int, num_kv_heads: int) -> tuple[Part, Part]:
    """Query heads and KV heads of a rank. Query heads stay with the KV head they read.

    4 KV heads over 2 ranks     0 1 | 2 3                 shared out, with their query heads
    2 KV heads over 4 ranks     0 | 0 | 1 | 1             replicated; the query heads of one are split
    3 KV heads over 2 ranks     0 1 | 2 -                 padded: head - is zero, and so are its queries
    """
    group = num_heads // num_kv_heads
    if size % num_kv_heads:
        kv = _share(rank, size, num_kv_heads)
        return Part(num_heads, kv.start * group, kv.filled * group, kv.count * group), kv
    copies = size // num_kv_heads
    head, which = divmod(rank, copies)
    queries = _share(which, copies, group)
    first = head * group + queries.start
    return Part(num_heads, first, queries.filled, queries.count), Part(num_kv_heads, head, 1, 1)


def check_split(config: ModelConfig, size: int) -> None:
    """Raise ConfigError unless the model can be split over `size` ranks. What does not divide is padded with
    zeros, at the cost of the padding; but a rank needs a query head."""
    if size > config.num_heads:
        raise ConfigError(
            f"tensor_parallel {size} is more than num_attention_heads {config.num_heads}: at most "
            f"{config.num_heads} ranks have work"
        )
