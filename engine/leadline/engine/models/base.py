"""What the runner needs of a model, whatever its family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = [
    "AttentionFn",
    "CausalLM",
    "HeadNorms",
    "KVTarget",
    "KVWrite",
    "Rotation",
    "Rotations",
    "SmallSteps",
]

HeadNorms = tuple[torch.Tensor, torch.Tensor, float]
"""RMSNorm of each query head and of each key head: weights [head_dim], [head_dim], and epsilon."""

Rotation = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""The last arguments of `Ops.rotary_heads` that say how far: cos, sin, and positions or None."""

Rotations = Sequence[Rotation]
"""Of the tokens of a step: one for each kind of rotation that a model's layers have."""

KVTarget = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Where a step's keys and values go: one layer's k and v cache (attention/interface.py), slot mapping int64
[T]; a token with a negative slot is not written."""


@dataclass(slots=True, frozen=True)
class KVWrite:
    """Where a model that `writes_kv` puts keys and values itself, before it calls `attend`."""

    caches: list[tuple[torch.Tensor, torch.Tensor]]
    """k and v cache of each layer, as attention/interface.py draws them"""
    slot_mapping: torch.Tensor
    """int64 [T]; negative: not written"""


class AttentionFn(Protocol):
    """Bound to a step by the runner: attention of layer `layer` over the paged cache.

    q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim], rotary embedding already applied (heads
    are this rank's). Returns [T, num_heads, head_dim].
    """

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor: ...


class SmallSteps(Protocol):
    """A second way through a model's layers for steps of few rows."""

    def takes(self, rows: int) -> bool:
        """Whether a step of `rows` rows goes this way."""

    def layers(
        self, residual: torch.Tensor, rotations: Rotations, attend: AttentionFn, write: KVWrite
    ) -> torch.Tensor:
        """residual [R, hidden], overwritten → hidden states [R, hidden] after the final norm."""

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """[R, hidden] → [R, vocab]; for one rank."""

    def may_take(self, rows: int) -> bool:
        """Whether steps of `rows` rows can go either way."""

    def choose(self, rows: int, here: bool) -> None:
        """Let steps of `rows` rows go this way (True) or the plain one (False)."""


class CausalLM(Protocol):
    """A decoder. T tokens packed without padding."""

    num_layers: int
    num_heads: int
    """Query heads of this tensor-parallel rank."""
    num_kv_heads: int
    """KV heads of this rank (replicated when the model has fewer than ranks)."""
    head_dim: int
    attention_scale: float
    """q·k is multiplied by it."""
    attention_softcap: float | None
    """It is then capped: softcap * tanh(x / softcap). None: not."""
    windows: tuple[int | None, ...]
    """Of each layer: tokens that a query sees, its own included. None: all."""
    vocab_size: int
    dtype: torch.dtype
    writes_kv: bool
    """It can write keys and values into the cache itself, fused with their rotation."""
    few_rows: SmallSteps | None

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: AttentionFn,
        write: KVWrite | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input_ids, positions int64 [T] → hidden states [T, hidden] after the final norm; of the tokens
        `rows` (int64 [S]) alone if they are given.

        `write` is only given to a model that `writes_kv`; the batch then says `kv_written`.
        """

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[R, hidden] → [R, vocab] in the model's dtype (gathered over ranks); in `out` if it is given."""
