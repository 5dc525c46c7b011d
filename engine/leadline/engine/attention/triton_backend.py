"""The `triton` attention backend: our own kernels, any block size, nothing planned on the host.

Rows with one query token go to the split-KV decode kernel, chunks to the prefill kernel. `begin` only
launches the kernels that make the two work lists; lengths are read on the device, so a CUDA graph captured
over `begin` and the layers' `forward` (or over the layers alone, with `begin` called before each replay) is
right for any lengths. In such a graph padding rows may have a context length of 0 (their output is zero)
and padding tokens a slot of -1.

If `fa3_fwd` can be imported, chunks that start at position 0 go through it (see fa3.py).

One instance serves one stream: its workspaces are reused from layer to layer.
"""

from __future__ import annotations

import math

import torch

from leadline.engine.attention.fa3 import FlashChunks
from leadline.engine.attention.interface import AttentionBatch, AttentionSpec
from leadline.engine.errors import ConfigError

__all__ = ["TritonBackend", "import_triton"]

_QUERIES = 64
"""Query tokens a prefill CTA."""

_SPLIT_PROGRAMS = 1536
"""Most CTAs among which the keys of a prefill are split."""
_FEW_PROGRAMS = 512
"""With no more CTAs than these, parts may be as short as _SHORT_PART keys; else they have _LONG_PART."""
_SHORT_PART, _LONG_PART = 256, 2048

_PDL_ROWS = 128
"""Up to so many rows the decode kernel starts before the one that makes q and the KV has ended."""

_EARLY_WIDTH = 2048
"""It lets the kernel after it start right away, a product that loads weights meanwhile; at one row only where
those weights (heads * head_dim columns) are few: an 8B step took 4.38 ms, not 4.10."""


def import_triton(setting: str) -> None:
    """Raise ConfigError, naming the setting that wants it, if Triton cannot be imported."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"attention_backend {setting!r} needs the package 'triton', which comes with torch built for "
            "CUDA; install it, or use attention_backend 'torch'"
        ) from error


class TritonBackend:
    """See `AttentionBackend`. float16, bfloat16 or float32; head_dim up to 256, a multiple of 8."""

    name = "triton"
    graph_padding = 0
    graph_chunks = True

    def __init__(self, spec: AttentionSpec) -> None:
        import_triton("triton")
        if spec.num_heads % spec.num_kv_heads:
            raise ConfigError(
                f"attention_backend 'triton' needs num_heads ({spec.num_heads}) to be a multiple of "
                f"num_kv_heads ({spec.num_kv_heads})"
            )
        if spec.block_size & (spec.block_size - 1) or not 16 <= spec.block_size <= 256:
            raise ConfigError(
                f"attention_backend 'triton' needs block_size 16, 32, 64, 128 or 256, not {spec.block_size}"
            )
        if spec.head_dim % 8 or not 16 <= spec.head_dim <= 256:
            raise ConfigError(
                "attention_backend 'triton' needs a head_dim that is a multiple of 8 from 16 to 256, not "
                f"{spec.head_dim}; attention_backend 'torch' takes any"
            )
        if spec.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ConfigError(
                f"attention_backend 'triton' works in float16, bfloat16 or float32, not {spec.dtype}"
            )
        if spec.max_rows >= 1 << 15:
            raise ConfigError(f"max_concurrent_requests must be below {1 << 15}, got {spec.max_rows}")
        self.spec = spec
        self.group = spec.num_heads // spec.num_kv_heads
        self._scale_log2 = (spec.softcap or spec.scale) * math.log2(math.e)
        self._cap_scale = 0.0 if spec.softcap is None else spec.scale / spec.softcap
        """Capped logits: the kernels take tanh of this many times q·k, and scale that."""
        self._dim_tile = _power_of_two(spec.head_dim)
        self._group_pad = _power_of_two(self.group)
        self._targets = (128, 256)
        """CTAs the decode kernel aims at: up to 2 rows, and above."""
        items = spec.max_rows + self._targets[1] // spec.num_kv_heads
        device = spec.device
        self._decode_lists = {
            window: (
                torch.zeros(items, dtype=torch.int32, device=device),
                torch.zeros(2, dtype=torch.int32, device=device),
            )
            for window in spec.windows
        }
        """Work list of the decode kernel, and its length, by the layer's window."""
        parts = (items, spec.num_kv_heads, self._group_pad)
        self._part_out = torch.empty((*parts, spec.head_dim), dtype=torch.float32, device=device)
        self._part_lse = torch.empty(parts, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(spec.max_rows * spec.num_kv_heads, dtype=torch.int32, device=device)
        self._prefill_meta = torch.zeros(1, dtype=torch.int32, device=device)
        self._prefill_items = torch.empty(0, dtype=torch.int32, device=device)
        self._prefill_splits = 1
        self._prefill_slots = 2 * _processors(device)
        """Prefill CTAs that run at once."""
        programs = (_SPLIT_PROGRAMS, _QUERIES)
        self._prefill_out = torch.empty((*programs, spec.head_dim), dtype=torch.float32, device=device)
        self._prefill_lse = torch.empty(programs, dtype=torch.float32, device=device)
        self._prefill_arrived = torch.zeros(_SPLIT_PROGRAMS, dtype=torch.int32, device=device)
        self._batch: AttentionBatch | None = None
        self._fa3 = FlashChunks(spec)
        self.graph_fresh_chunks = self._fa3.available
        self._fresh = (0, 0)
        """First row and first token that FA3 takes."""
        self._target = self._targets[1]

    def begin(self, batch: AttentionBatch) -> None:
        """Launch the work-list kernels of this step. Nothing is read back."""
        from leadline.engine.attention import triton_decode, triton_prefill

        spec = self.spec
        self._batch = batch
        self._fresh = self._fa3.begin(batch)
        first = self._fresh[0]
        decodes, chunks = batch.num_decodes, first - batch.num_decodes
        if decodes:
            self._target = self._targets[0] if decodes <= 2 else self._targets[1]
            for window, (items, meta) in self._decode_lists.items():
                triton_decode.decode_items_kernel[(decodes,)](
                    batch.context_lens,
                    items,
                    meta,
                    decodes,
                    self._target,
                    KV_HEADS=spec.num_kv_heads,
                    STEP=triton_decode.CHUNK_STEP,
                    BLOCK_ROWS=_power_of_two(spec.max_rows),
                    MAX_CHUNKS=_power_of_two(self._targets[1] // spec.num_kv_heads + 1),
                    WINDOW=window or 0,
                    num_warps=4,
                )
        if chunks and not self._fa3.takes_prefix:
            queries = batch.query_lens_host[decodes:first]
            most = sum(-(-count // _QUERIES) for count in queries)
            self._prefill_items = torch.empty(most, dtype=torch.int32, device=spec.device)
            self._prefill_splits = prefill_splits(
                most * spec.num_heads, batch.max_context_len, self._prefill_slots
            )
            triton_prefill.prefill_items_kernel[(chunks,)](
                batch.cu_q,
                self._prefill_items,
                self._prefill_meta,
                decodes,
                chunks,
                QUERIES=_QUERIES,
                BLOCK_ROWS=_power_of_two(spec.max_rows),
                num_warps=4,
            )

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

        batch = self._batch
        if batch is None:
            raise RuntimeError("begin(batch) comes before forward")
        q, k, v = _heads_packed(q), _heads_packed(k), _heads_packed(v)
        if not batch.kv_written:
            write_kv(k, v, k_cache, v_cache, batch.slot_mapping)
        decodes = batch.num_decodes
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        first, token = self._fresh
        if self._fa3.takes_prefix:
            self._fa3.attend_prefix(q[decodes:token], k_cache, v_cache, out[decodes:token], window)
        elif first > decodes:
            self.prefill(q, k_cache, v_cache, out, window)
        if first < batch.num_rows:
            self._fa3.attend(q[token:], k[token:], v[token:], out[token:], window)
        if decodes:
            self.decode(q, k_cache, v_cache, out, window)
        return out

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        window: int | None,
    ) -> None:
        """Attend for the rows with one query token: the first num_decodes rows of q and out."""
        from leadline.engine.attention.triton_decode import CHUNK_STEP, decode_kernel

        batch, spec = self._batch, self.spec
        assert batch is not None
        tile, warps, stages = self._decode_tiles(batch.num_decodes, k_cache.dtype)
        items, meta = self._decode_lists[window]
        pdl = batch.kv_written and batch.num_rows <= _PDL_ROWS
        grid = (batch.num_decodes + self._target // spec.num_kv_heads) * spec.num_kv_heads
        decode_kernel[(grid,)](
            q,
            k_cache,
            v_cache,
            out,
            batch.block_tables,
            batch.context_lens,
            items,
            meta,
            self._part_out,
            self._part_lse,
            self._arrived,
            self._scale_log2,
            self._cap_scale,
            q.stride(0),
            batch.block_tables.stride(0),
            k_cache.stride(0),
            KV_HEADS=spec.num_kv_heads,
            GROUP=self.group,
            HEAD_DIM=spec.head_dim,
            BLOCK_SIZE=spec.block_size,
            GROUP_TILE=max(16, self._group_pad),
            GROUP_PAD=self._group_pad,
            DIM_TILE=self._dim_tile,
            TILE=tile,
            MERGE=max(1, min(8, 2048 // (self._group_pad * self._dim_tile))),
            PRECISION=self._precision,
            STEP=CHUNK_STEP,
            WINDOW=window or 0,
            CAPPED=spec.softcap is not None,
            PDL=pdl,
            EARLY=pdl and self._early(batch.num_rows),
            num_warps=warps,
            num_stages=stages,
            **({"launch_pdl": True} if pdl else {}),
        )

    def prefill(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        window: int | None,
    ) -> None:
        """Attend for the chunk rows that FA3 does not take: rows num_decodes and up of the batch."""
        from leadline.engine.attention.triton_prefill import prefill_kernel

        batch, spec = self._batch, self.spec
        assert batch is not None
        tile, warps, stages = self._prefill_tiles()
        splits = self._prefill_splits
        prefill_kernel[(self._prefill_items.shape[0] * spec.num_heads, splits)](
            q,
            k_cache,
            v_cache,
            out,
            batch.block_tables,
            batch.cu_q,
            batch.context_lens,
            self._prefill_items,
            self._prefill_meta,
            self._prefill_out,
            self._prefill_lse,
            self._prefill_arrived,
            self._scale_log2,
            self._cap_scale,
            q.stride(0),
            batch.block_tables.stride(0),
            k_cache.stride(0),
            HEADS=spec.num_heads,
            KV_HEADS=spec.num_kv_heads,
            HEAD_DIM=spec.head_dim,
            BLOCK_SIZE=spec.block_size,
            QUERIES=_QUERIES,
            TILE=tile,
            DIM_TILE=self._dim_tile,
            PRECISION=self._precision,
            WINDOW=window or 0,
            CAPPED=spec.softcap is not None,
            SPLITS=splits,
            LEAST_KEYS=_least_keys(self._prefill_items.shape[0] * spec.num_heads * splits),
            num_warps=warps,
            num_stages=stages,
        )

    def _early(self, rows: int) -> bool:
        return rows > 1 or self.spec.num_heads * self.spec.head_dim <= _EARLY_WIDTH

    @property
    def _precision(self) -> str:
        # Triton multiplies float32 in tf32 unless told otherwise; 16-bit inputs are not affected.
        return "ieee" if self.spec.dtype == torch.float32 else "tf32"

    def _decode_tiles(self, rows: int, cache_dtype: torch.dtype) -> tuple[int, int, int]:
        """(keys a tile, warps, pipeline stages), as measured on an H200 by benchmarks/gpu_attention.py. With
        three stages two CTAs of 64 keys fit an SM, which is better for many rows, above all for uneven ones;
        keys of 8 bits fit more, and gain from more stages as long as rows are few."""
        size = self.spec.block_size
        if self.spec.dtype == torch.float32 or self._dim_tile > 128 or self._group_pad > 16:
            return 16, 4, 2
        if size == 16:
            return 16, 1, 6
        if self._dim_tile <= 64:
            return 32, 1, 3
        few = 16 if cache_dtype.itemsize == 2 else 64
        return (32 if size == 32 else 64), 2, 4 if rows <= few else 3

    def _prefill_tiles(self) -> tuple[int, int, int]:
        """(keys a tile, warps, pipeline stages)"""
        if self.spec.dtype == torch.float32 or self._dim_tile > 128:
            return 32, 4, 2
        return 64, 4, 3


def _heads_packed(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, dim] with its heads side by side, whatever the token stride; copied only if they are
    not."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _processors(device: torch.device) -> int:
    """Multiprocessors of the GPU; a GPU's worth where Triton's interpreter runs on the CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def prefill_splits(programs: int, context: int, slots: int) -> int:
    """Parts that the keys of each of `programs` query blocks are split into: 1, 2, 4 or 8.

    `slots` CTAs run at once, so the time is that of ceil(programs * splits / slots) rounds of a part each. A
    split must save a tenth of it and leave each part enough keys.
    """
    best, rounds = 1, math.ceil(programs / slots)
    for splits in (2, 4, 8):
        total = programs * splits
        if total > _SPLIT_PROGRAMS or context < splits * _least_keys(total):
            break
        if math.ceil(total / slots) / splits < 0.9 * rounds:
            best, rounds = splits, math.ceil(total / slots) / splits
    return best


def _least_keys(programs: int) -> int:
    return _SHORT_PART if programs <= _FEW_PROGRAMS else _LONG_PART


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
