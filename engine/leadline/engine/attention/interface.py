"""Attention backends behind one interface: write this step's keys and values into the paged cache, then
attend.

KV cache of one layer (what `kv_cache[layer]` is):

    k, v : [num_blocks, block_size, num_kv_heads, head_dim]     zeroed at allocation: TMA reads past a row

    the token at position p of a sequence with block table T lives in block T[p // block_size],
    row p % block_size; its *slot mapping* is T[p // block_size] * block_size + p % block_size.

Queries of a step are packed without padding: rows with one query token first (`num_decodes` of them),
then prefill chunks. Row i's queries are q[cu_q[i] : cu_q[i + 1]] and stand at the END of its context:
query j of row i sits at position context_lens[i] - (cu_q[i + 1] - cu_q[i]) + j and attends to positions 0
.. its own (causal), in a layer with a sliding window to the last `window` of them. Every layer writes the
whole step's KV before any row attends, so a row may read blocks that another row fills in this same step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["AttentionBackend", "AttentionBatch", "AttentionSpec"]


@dataclass(slots=True, frozen=True)
class AttentionSpec:
    """Shapes that never change during an engine's life (per tensor-parallel rank)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    max_rows: int
    max_model_len: int
    windows: tuple[int | None, ...] = (None,)
    """The sliding windows of the layers, each once: tokens that a query sees, its own included; None: all."""
    softcap: float | None = None
    """Attention logits, scaled, become softcap * tanh(logit / softcap)."""


@dataclass(slots=True)
class AttentionBatch:
    """One step's shapes, shared by all layers. Tensors live on the device; lists mirror them on the host."""

    num_rows: int
    num_decodes: int
    num_tokens: int
    cu_q: torch.Tensor
    """int32 [num_rows + 1]"""
    context_lens: torch.Tensor
    """int32 [num_rows]: KV length of each row including this step's tokens"""
    block_tables: torch.Tensor
    """int32 [num_rows, >= ceil(max context / block_size)]; entries past a row's blocks are 0"""
    slot_mapping: torch.Tensor
    """int64 [num_tokens]"""
    query_lens_host: list[int]
    context_lens_host: list[int]
    max_query_len: int
    max_context_len: int
    kv_written: bool = False
    """k and v of every layer are in the cache when `forward` is called: the model wrote them."""
    captured: bool = False
    """Part of a CUDA graph: the host's lists are bounds of the lengths, not the lengths."""


class AttentionBackend(Protocol):
    """One instance an engine; `begin` once a step, `forward` once a layer."""

    name: str
    graph_padding: int | None
    """Context length that padding rows of a captured decode step must have (their slot mapping is -1); None
    if `begin` and `forward` look at the host's lists, so that a step cannot be captured."""
    graph_chunks: bool
    """Steps with a chunk can be captured too, and be right for any shorter chunk after any context."""
    graph_fresh_chunks: bool
    """Captured steps whose chunk starts at position 0 (the host's lists say so) take a faster way, and are
    right for any shorter chunk that does."""

    def begin(self, batch: AttentionBatch) -> None:
        """Prepare what all layers share (masks, work lists, gathers' indices)."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        window: int | None = None,
    ) -> torch.Tensor:
        """Write k, v at the batch's slot mapping (unless they are written), then attend.

        q [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]; caches as drawn above;
        window: the layer's, one of the spec's.
        Returns [num_tokens, num_heads, head_dim] in q's dtype.
        """
