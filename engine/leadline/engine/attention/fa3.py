"""FlashAttention-3 for chunks without a prefix, where the optional package `fa3_fwd` can be imported.

The package is forward only, for Hopper, and built without paging and without float16: it attends to a
step's own fresh k and v, so it applies to chunks that start at position 0. Of a step's chunks those under way
come first and fresh ones last, which is why they are one slice:

    rows    | decodes | chunks after a prefix | fresh chunks |
                                              ^ FreshChunks.first
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from leadline.engine.attention.interface import AttentionBatch, AttentionSpec

__all__ = ["FreshChunks"]


class FreshChunks:
    """Decides for each step which chunks FA3 takes, and runs it."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._scale = spec.scale
        self._forward = _import_fa3(spec)
        self._cu = torch.empty(0)
        self._longest = 0

    @property
    def available(self) -> bool:
        return self._forward is not None

    def begin(self, batch: AttentionBatch) -> tuple[int, int]:
        """(first row, first token) that `attend` is for; (num_rows, num_tokens) if there are none."""
        first, token = batch.num_rows, batch.num_tokens
        if self._forward is None:
            return first, token
        queries, contexts = batch.query_lens_host, batch.context_lens_host
        while first > batch.num_decodes and queries[first - 1] == contexts[first - 1]:
            first -= 1
            token -= queries[first]
        if first < batch.num_rows:
            cu = batch.cu_q[first:]
            self._cu = cu - token if token else cu
            self._longest = max(queries[first : batch.num_rows])
        return first, token

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """q [T, heads, dim], k, v [T, kv_heads, dim] of the fresh chunks alone → out like q, contiguous."""
        assert self._forward is not None
        self._forward(q, k, v, out, self._cu, self._longest, self._scale)


def _import_fa3(spec: AttentionSpec) -> Callable[..., None] | None:
    """fa3_fwd's forward where it applies: bfloat16 on Hopper with a usual head_dim."""
    if spec.dtype != torch.bfloat16 or spec.head_dim not in (64, 128) or spec.device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(spec.device)[0] != 9:
        return None
    try:
        import fa3_fwd._C  # noqa: F401  (registers the operator)
    except ImportError:
        return None
    operator: Any = torch.ops.fa3_fwd.fwd

    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        cu: torch.Tensor,
        longest: int,
        scale: float,
    ) -> None:
        # The package's public function has no `out`. In its order: new k and v, qv | out | row boundaries |
        # used lengths, longest rows | paging, rotation, scales of 8-bit inputs | scale, causal, window.
        operator(
            q, k, v, None, None, None, out, cu, cu, None, None, None, longest, longest,
            *[None] * 9, scale, True, -1, -1, 0, 0.0, True, None, 1, None, 0,
        )  # fmt: skip

    return forward
