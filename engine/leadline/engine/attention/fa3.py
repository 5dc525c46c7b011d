"""FlashAttention-3 for prompt chunks, where the optional package `fa3_fwd` can be imported.

The package is forward only, for Hopper, and built without paging and without float16. It takes

    fresh chunks     those that start at position 0 attend to the step's own k and v
    a long chunk     the only one after a prefix, if it has many tokens: its keys and values are first copied
                     out of the cache's blocks, which costs little beside attention

Of a step's chunks those under way come first and fresh ones last, which is why they are one slice:

    rows    | decodes | chunks after a prefix | fresh chunks |
                                              ^ first
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from leadline.engine.attention.interface import AttentionBatch, AttentionSpec

__all__ = ["FlashChunks"]

_LEAST_QUERIES = 1024
"""Tokens of a chunk after a prefix from which on copying its keys and values pays."""
_MOST_BYTES = 1 << 30
"""Of such a copy. Less than what gpu_memory_utilization leaves free on any Hopper GPU."""


class FlashChunks:
    """Decides for each step which chunks FA3 takes, and runs it."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._scale = spec.scale
        self._forward = _import_fa3(spec)
        self._cu = torch.empty(0)
        self._longest = 0
        self._row_bytes = 2 * 2 * spec.num_kv_heads * spec.head_dim
        self.takes_prefix = False
        """The step's only chunk after a prefix is for `attend_prefix`."""
        self._queries = self._context = 0
        self._blocks = self._cu_prefix = self._cu_context = self._cu

    @property
    def available(self) -> bool:
        return self._forward is not None

    def begin(self, batch: AttentionBatch) -> tuple[int, int]:
        """(first row, first token) that `attend` is for; (num_rows, num_tokens) if there are none."""
        first, token = batch.num_rows, batch.num_tokens
        self.takes_prefix = False
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
        if first == batch.num_decodes + 1 and not batch.captured:
            self._begin_prefix(batch, first - 1)
        return first, token

    def _begin_prefix(self, batch: AttentionBatch, row: int) -> None:
        self._queries, self._context = batch.query_lens_host[row], batch.context_lens_host[row]
        if self._queries < _LEAST_QUERIES or self._context * self._row_bytes > _MOST_BYTES:
            return
        self.takes_prefix = True
        self._blocks = batch.block_tables[row]
        ends = torch.stack((batch.cu_q[row + 1] - batch.cu_q[row], batch.context_lens[row]))
        self._cu_prefix, self._cu_context = torch.nn.functional.pad(ends[:, None], (1, 0)).to(torch.int32)

    def attend_prefix(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        window: int | None,
    ) -> None:
        """q [T, heads, dim] of the long chunk, its keys and values in the cache → out like q, contiguous."""
        assert self._forward is not None
        blocks = self._blocks[: -(-self._context // k_cache.shape[1])]
        k, v = (
            cache.index_select(0, blocks).flatten(0, 1)[: self._context].to(q.dtype)
            for cache in (k_cache, v_cache)
        )
        self._forward(
            q, k, v, out, self._cu_prefix, self._cu_context, self._queries, self._context, self._scale, window
        )

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, window: int | None
    ) -> None:
        """q [T, heads, dim], k, v [T, kv_heads, dim] of the fresh chunks alone → out like q, contiguous."""
        assert self._forward is not None
        self._forward(q, k, v, out, self._cu, self._cu, self._longest, self._longest, self._scale, window)


def _import_fa3(spec: AttentionSpec) -> Callable[..., None] | None:
    """fa3_fwd's forward where it applies: bfloat16 on Hopper with a usual head_dim, no capped logits, and
    windows only if the package was built with them."""
    if spec.softcap is not None or spec.dtype != torch.bfloat16 or spec.device.type != "cuda":
        return None
    if spec.head_dim not in (64, 128):
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
        cu_q: torch.Tensor,
        cu_k: torch.Tensor,
        longest_q: int,
        longest_k: int,
        scale: float,
        window: int | None,
    ) -> None:
        # The package's public function has no `out`. In its order: new k and v, qv | out | row boundaries |
        # used lengths, longest rows | paging, rotation, scales of 8-bit inputs | scale, causal, window.
        left = -1 if window is None else window - 1
        operator(
            q, k, v, None, None, None, out, cu_q, cu_k, None, None, None, longest_q, longest_k,
            *[None] * 9, scale, True, left, -1, 0, 0.0, True, None, 1, None, 0,
        )  # fmt: skip

    return forward if set(spec.windows) == {None} or _takes_windows(forward, spec) else None


def _takes_windows(forward: Callable[..., None], spec: AttentionSpec) -> bool:
    """Whether it runs with a window and hides keys: a library built without windows may do neither."""
    tokens, window = 8, 2
    shape = (tokens, 1, spec.head_dim)
    q, k = (torch.zeros(shape, dtype=spec.dtype, device=spec.device) for _ in range(2))
    v, out = torch.zeros_like(q), torch.zeros_like(q)
    v[0] = 1.0
    cu = torch.tensor([0, tokens], dtype=torch.int32, device=spec.device)
    try:
        forward(q, k, v, out, cu, cu, tokens, tokens, spec.scale, window)
    except RuntimeError:
        return False
    return bool(out[0].all()) and bool(out[window - 1].all()) and not out[window:].any()
