"""What the runner needs of a model, whatever its family."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["AttentionFn", "CausalLM"]


class AttentionFn(Protocol):
    """Bound to a step by the runner: attention of layer `layer` over the paged cache.

    q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim], rotary embedding already applied (heads
    are this rank's). Returns [T, num_heads, head_dim].
    """

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor: ...


class CausalLM(Protocol):
    """A decoder. T tokens packed without padding."""

    num_layers: int
    num_heads: int
    """Query heads of this tensor-parallel rank."""
    num_kv_heads: int
    """KV heads of this rank (replicated when the model has fewer than ranks)."""
    head_dim: int
    vocab_size: int
    dtype: torch.dtype

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: AttentionFn) -> torch.Tensor:
        """input_ids, positions int64 [T] → hidden states [T, hidden] after the final norm."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] → [R, vocab] in the model's dtype (gathered over ranks)."""
