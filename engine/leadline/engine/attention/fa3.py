"""FlashAttention-3 for chunks without a prefix, where the optional package `fa3_fwd` can be imported.

The package is forward only, for Hopper, and built without paging and without float16: it attends to a
step's own fresh k and v, so it applies when every chunk of the step starts at position 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from leadline.engine.attention.interface import AttentionBatch, AttentionSpec

__all__ = ["FreshChunks"]


class FreshChunks:
    """Decides for each step whether FA3 takes its chunks, and runs it."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._scale = spec.scale
        self._varlen = _import_fa3(spec)

    def take(self, batch: AttentionBatch) -> bool:
        """Whether `attend` may be used for the chunks of this batch."""
        first, last = batch.num_decodes, batch.num_rows
        return (
            self._varlen is not None
            and first < last
            and batch.query_lens_host[first:last] == batch.context_lens_host[first:last]
        )

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_chunks: torch.Tensor, longest: int
    ) -> torch.Tensor:
        """q [T, heads, dim], k, v [T, kv_heads, dim] of the chunks alone; cu_chunks int32 [chunks + 1] from
        0."""
        assert self._varlen is not None
        out: torch.Tensor = self._varlen(
            q,
            k,
            v,
            cu_seqlens_q=cu_chunks,
            cu_seqlens_k=cu_chunks,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=self._scale,
            causal=True,
        )
        return out


def _import_fa3(spec: AttentionSpec) -> Callable[..., Any] | None:
    """fa3_fwd's varlen function where it applies: bfloat16 on Hopper with a usual head_dim."""
    if spec.dtype != torch.bfloat16 or spec.head_dim not in (64, 128) or spec.device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(spec.device)[0] != 9:
        return None
    try:
        from fa3_fwd_interface import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func
