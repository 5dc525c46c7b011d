"""The `flash_attn` attention backend: flash-attn 2 over the paged cache, FlashAttention-3 for fresh prompts
if present.

Rows with one query token go to `flash_attn_with_kvcache`, chunks to `flash_attn_varlen_func` with the block
table. flash-attn 2 pages only in blocks that are a multiple of 256 tokens; other block sizes are refused by
name rather than gathered, since the `triton` backend reads them in place and is faster there.

If the package `fa3_fwd` (forward only, bfloat16, no paging) can be imported, chunks that start at position 0
attend to their own fresh k and v through it.

The decode call's number of splits is frozen when a CUDA graph captures it (flash-attn derives it from the
table's width); its results stay right for any lengths. Padding tokens of such a graph may have a slot of
-1, padding rows need a context length of at least 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from leadline.engine.attention.fa3 import FlashChunks
from leadline.engine.attention.interface import AttentionBatch, AttentionSpec
from leadline.engine.errors import ConfigError

__all__ = ["FlashBackend"]

_BLOCK_MULTIPLE = 256


class FlashBackend:
    """See `AttentionBackend`. float16 or bfloat16, CUDA only, head_dim a multiple of 8 up to 256."""

    name = "flash_attn"
    graph_padding = 1
    graph_chunks = False
    graph_fresh_chunks = False

    def __init__(self, spec: AttentionSpec) -> None:
        if spec.block_size % _BLOCK_MULTIPLE:
            raise ConfigError(
                f"attention_backend 'flash_attn' needs a block_size that is a multiple of {_BLOCK_MULTIPLE}: "
                f"set block_size {_BLOCK_MULTIPLE} instead of {spec.block_size}, or attention_backend "
                "'triton', which takes 16 to 256"
            )
        if spec.dtype not in (torch.float16, torch.bfloat16):
            raise ConfigError(
                f"attention_backend 'flash_attn' works in float16 or bfloat16, not {spec.dtype}: set dtype "
                "bfloat16, or attention_backend 'triton' or 'torch'"
            )
        if spec.head_dim % 8 or spec.head_dim > 256:
            raise ConfigError(
                "attention_backend 'flash_attn' needs a head_dim that is a multiple of 8 up to 256, not "
                f"{spec.head_dim}; attention_backend 'torch' takes any"
            )
        if spec.device.type != "cuda":
            raise ConfigError(
                f"attention_backend 'flash_attn' runs on device cuda only, not {spec.device.type}: "
                "use 'torch'"
            )
        self.spec = spec
        self._with_kvcache, self._varlen = _import_flash_attn()
        self._softcap = 0.0 if spec.softcap is None else spec.softcap
        self._fa3 = FlashChunks(spec)
        self._batch: AttentionBatch | None = None
        self._cu_chunks: torch.Tensor | None = None
        self._cu_context: torch.Tensor | None = None
        self._fresh = (0, 0)
        """First row and first token that FA3 takes."""

    def begin(self, batch: AttentionBatch) -> None:
        """Row boundaries of the chunks. Nothing is read back from the device."""
        self._batch = batch
        self._fresh = first, _ = self._fa3.begin(batch)
        decodes = batch.num_decodes
        if first == decodes:
            return
        # cu_q counts from the step's first token; the chunks' packed queries start after the decode rows.
        self._cu_chunks = batch.cu_q[decodes : first + 1] - decodes
        lens = batch.context_lens[decodes:first]
        self._cu_context = torch.nn.functional.pad(torch.cumsum(lens, 0, dtype=torch.int32), (1, 0))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        window: int | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`. q, k and v may be slices of one merged projection."""
        from leadline.engine.attention.triton_kv_write import write_kv

        batch, spec = self._batch, self.spec
        if batch is None:
            raise RuntimeError("begin(batch) comes before forward")
        if not batch.kv_written:
            write_kv(k, v, k_cache, v_cache, batch.slot_mapping)
        decodes = batch.num_decodes
        first, token = self._fresh
        parts = []
        if decodes:
            out = self._with_kvcache(
                q[:decodes].unsqueeze(1),
                k_cache,
                v_cache,
                cache_seqlens=batch.context_lens[:decodes],
                block_table=batch.block_tables[:decodes],
                softmax_scale=spec.scale,
                causal=True,
                window_size=_window_size(window),
                softcap=self._softcap,
            )
            parts.append(out.squeeze(1))
        if first > decodes:
            parts.append(self._chunks(q[decodes:token], k_cache, v_cache, window))
        if first < batch.num_rows:
            fresh = torch.empty((len(q) - token, *q.shape[1:]), dtype=q.dtype, device=q.device)
            self._fa3.attend(q[token:], k[token:], v[token:], fresh, window)
            parts.append(fresh)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _chunks(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """The chunks that FA3 does not take."""
        batch, first = self._batch, self._fresh[0]
        assert batch is not None
        decodes = batch.num_decodes
        return self._varlen(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=self._cu_chunks,
            cu_seqlens_k=self._cu_context,
            max_seqlen_q=max(batch.query_lens_host[decodes:first]),
            max_seqlen_k=max(batch.context_lens_host[decodes:first]),
            softmax_scale=self.spec.scale,
            causal=True,
            window_size=_window_size(window),
            softcap=self._softcap,
            block_table=batch.block_tables[decodes:first],
        )


def _window_size(window: int | None) -> tuple[int, int]:
    """Keys before and after a query's own that it sees, as flash-attn counts them; -1: all."""
    return (-1, -1) if window is None else (window - 1, 0)


def _import_flash_attn() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
    except ImportError as error:
        raise ConfigError(
            "attention_backend 'flash_attn' needs the package flash-attn (2.8 or newer), which does not "
            f"import here ({error}): pip install flash-attn --no-build-isolation, or use "
            "attention_backend 'triton'"
        ) from error
    return flash_attn_with_kvcache, flash_attn_varlen_func
