"""Paged decode attention in Triton: one query token a row, keys split over CTAs that would idle.

Everything that depends on lengths is decided on the device, so a CUDA graph replays with any lengths.

    context_lens ──decode_items_kernel──▶ chunk size, list of (row, chunk) items
                                                   │ one CTA an (item, KV head)
    row of 700 keys, chunk 256:                    ▼
        |--- chunk 0 ---|--- chunk 1 ---|--- chunk 2 -|   each writes a normalised partial output and its
              CTA             CTA             CTA         base-2 log-sum-exp; the last to arrive merges
                                                             them in chunk order

The chunk size is tokens * KV heads / target CTAs, rounded up to a multiple of CHUNK_STEP, which bounds the
number of items by rows + target // KV heads: grid and workspace are fixed. A row with a context of 0
(padding) gets one item and a zero output.

In a layer with a window the keys of a row begin at the multiple of CHUNK_STEP at or below the first that it
sees; those below it are never loaded either.

Invariants: a tile of keys never crosses a block (TILE divides block_size and CHUNK_STEP); keys past the
chunk's end are never loaded, so whatever lies in unwritten cache rows (NaN too) cannot reach the result;
partials are merged in a fixed order, so equal inputs give equal bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["CHUNK_STEP", "decode_items_kernel", "decode_kernel", "tanh"]

CHUNK_STEP = 64
"""Chunks are multiples of this many keys."""


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def widen(x):
    """e4m3 → float16, as the hardware does it. As assembly that the compiler does not move: else it lays a
    tile out for the tensor cores first, and reads the transposed operand from shared memory byte by byte."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [x],
        dtype=tl.float16,
        is_pure=False,
        pack=4,
    )


@triton.jit(do_not_specialize=["num_rows", "target"], do_not_specialize_on_alignment=["context_lens"])
def decode_items_kernel(
    context_lens,
    items,
    meta,
    num_rows,
    target,
    KV_HEADS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Program r writes row r's items, `row | chunk << 16`; meta = [number of items, keys a chunk].

    Each program sums over all rows by itself, so none waits for another. `target` is the number of CTAs to
    aim at; MAX_CHUNKS > target // KV_HEADS; WINDOW 0: none.
    """
    row = tl.program_id(0)
    rows = tl.arange(0, BLOCK_ROWS)
    lens = tl.load(context_lens + rows, mask=rows < num_rows, other=0)
    if WINDOW:
        lens -= tl.maximum(lens - WINDOW, 0) // STEP * STEP
    wanted = tl.cdiv(tl.sum(lens.to(tl.int64), axis=0) * KV_HEADS, target)
    chunk = (tl.maximum(tl.cdiv(wanted, STEP), 1) * STEP).to(tl.int32)
    counts = tl.where(rows < num_rows, tl.maximum(tl.cdiv(lens, chunk), 1), 0)
    first = tl.sum(tl.where(rows < row, counts, 0), axis=0)
    mine = tl.sum(tl.where(rows == row, counts, 0), axis=0)
    index = tl.arange(0, MAX_CHUNKS)
    tl.store(items + first + index, row | (index << 16), mask=index < mine)
    if row == 0:
        tl.store(meta, tl.sum(counts, axis=0))
        tl.store(meta + 1, chunk)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_tables", "context_lens"],
)
def decode_kernel(
    q,
    k_cache,
    v_cache,
    out,
    block_tables,
    context_lens,
    items,
    meta,
    part_out,
    part_lse,
    arrived,
    scale_log2,
    cap_scale,
    q_stride,
    table_stride,
    page_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM_TILE: tl.constexpr,
    TILE: tl.constexpr,
    MERGE: tl.constexpr,
    PRECISION: tl.constexpr,
    STEP: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """q [rows, KV_HEADS * GROUP, HEAD_DIM] with q_stride elements a row; caches [pages, BLOCK_SIZE, KV_HEADS,
    HEAD_DIM] with page_stride elements a page; out like q, contiguous.

    part_out float32 [items, KV_HEADS, GROUP_PAD, HEAD_DIM], part_lse float32 [items, KV_HEADS, GROUP_PAD];
    arrived int32 [rows, KV_HEADS], zero before and after. Query heads of one KV head are consecutive and
    fill the first GROUP of GROUP_TILE rows of the matrix product; GROUP_PAD is GROUP's next power of two.
    STEP is CHUNK_STEP. WINDOW 0: none. CAPPED: logits are tanh(cap_scale * q·k), before scale_log2.
    """
    pid = tl.program_id(0)
    item = pid // KV_HEADS
    head = pid % KV_HEADS
    packed = tl.load(items + item)
    num_items = tl.load(meta)
    chunk = tl.load(meta + 1)
    if PDL:
        # The work list is older than the kernel before this one; q and this step's KV are not.
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
    if item >= num_items:
        return
    row = packed & 0xFFFF
    index = packed >> 16
    context = tl.load(context_lens + row)
    first = 0
    if WINDOW:
        first = tl.maximum(context - WINDOW, 0) // STEP * STEP
    begin = first + index * chunk
    end = tl.minimum(begin + chunk, context)

    groups = tl.arange(0, GROUP_TILE)
    dims = tl.arange(0, DIM_TILE)
    keys = tl.arange(0, TILE)
    dim_ok = dims < HEAD_DIM
    q_base = q + row.to(tl.int64) * q_stride + head * GROUP * HEAD_DIM
    q_tile = tl.load(
        q_base + groups[:, None] * HEAD_DIM + dims[None, :],
        mask=(groups < GROUP)[:, None] & dim_ok[None, :],
        other=0.0,
    )
    if k_cache.dtype.element_ty == tl.float8e4nv:
        q_tile = q_tile.to(tl.float16)  # what the hardware turns e4m3 into
    table = block_tables + row.to(tl.int64) * table_stride
    page = tl.load(table + begin // BLOCK_SIZE, mask=begin < end, other=0)
    offsets = keys[:, None] * (KV_HEADS * HEAD_DIM) + head * HEAD_DIM + dims[None, :]

    peak = tl.full([GROUP_TILE], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP_TILE, TILE], tl.float32)
    acc = tl.zeros([GROUP_TILE, DIM_TILE], tl.float32)
    for start in range(begin, end, TILE):
        # The page of the next tile is fetched now: its latency hides behind this tile.
        ahead = start + TILE
        next_page = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        base = page.to(tl.int64) * page_stride + (start % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM)
        live = start + keys < end
        if WINDOW:
            live = live & (start + keys >= context - WINDOW)
        mask = live[:, None] & dim_ok[None, :]
        k = tl.load(k_cache + base + offsets, mask=mask, other=0.0).to(q_tile.dtype)
        scores = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION)
        if CAPPED:
            scores = tanh(scores * cap_scale)
        scores *= scale_log2
        scores = tl.where(live[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        if WINDOW:
            # The first tile may hold no key of the window: keep -inf - -inf out of the exponentials.
            new_peak = tl.maximum(new_peak, -1e30)
        shrink = tl.exp2(peak - new_peak)
        probs = tl.exp2(scores - new_peak[:, None])
        weight = weight * shrink[:, None] + probs
        v = tl.load(v_cache + base + offsets, mask=mask, other=0.0)
        v = widen(v) if v_cache.dtype.element_ty == tl.float8e4nv else v.to(q_tile.dtype)
        acc = tl.dot(probs.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        peak = new_peak
        page = next_page

    if PDL and not EARLY:
        gdc_launch_dependents()
    total = tl.sum(weight, axis=1)
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    num_chunks = tl.maximum(tl.cdiv(context - first, chunk), 1)
    out_base = out + (row.to(tl.int64) * KV_HEADS + head) * GROUP * HEAD_DIM
    if num_chunks == 1:
        tl.store(
            out_base + groups[:, None] * HEAD_DIM + dims[None, :],
            result.to(out.dtype.element_ty),
            mask=(groups < GROUP)[:, None] & dim_ok[None, :],
        )
    else:
        part = item.to(tl.int64) * KV_HEADS + head
        tl.store(
            part_out + part * (GROUP_PAD * HEAD_DIM) + groups[:, None] * HEAD_DIM + dims[None, :],
            result,
            mask=(groups < GROUP_PAD)[:, None] & dim_ok[None, :],
        )
        tl.store(part_lse + part * GROUP_PAD + groups, peak + tl.log2(total), mask=groups < GROUP_PAD)
        # All threads' partial stores come before the release of the one atomic (barrier, then acq_rel).
        tl.debug_barrier()
        counter = arrived + row * KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_chunks - 1:
            tl.store(counter, 0)
            _merge(
                part_out,
                part_lse,
                (item - index).to(tl.int64),
                num_chunks,
                head,
                out_base,
                KV_HEADS,
                GROUP,
                HEAD_DIM,
                GROUP_PAD,
                DIM_TILE,
                MERGE,
            )


@triton.jit
def _merge(
    part_out,
    part_lse,
    first_item,
    num_chunks,
    head,
    out_base,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM_TILE: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Combine the partials of items first_item .. first_item + num_chunks - 1, MERGE at a time, in order."""
    parts = tl.arange(0, MERGE)
    groups = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_TILE)
    dim_ok = dims < HEAD_DIM
    inner = groups[:, None] * HEAD_DIM + dims[None, :]
    peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_TILE], tl.float32)
    for start in range(0, num_chunks, MERGE):
        live = start + parts < num_chunks
        part = (first_item + start + parts) * KV_HEADS + head
        # .cg: other CTAs wrote these; read them from L2, where they are.
        lse = tl.load(
            part_lse + part[:, None] * GROUP_PAD + groups[None, :],
            mask=live[:, None],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        outs = tl.load(
            part_out + part[:, None, None] * (GROUP_PAD * HEAD_DIM) + inner[None, :, :],
            mask=live[:, None, None] & dim_ok[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_peak = tl.maximum(peak, tl.max(lse, axis=0))
        shrink = tl.exp2(peak - new_peak)
        scale = tl.exp2(lse - new_peak[None, :])
        acc = acc * shrink[:, None] + tl.sum(outs * scale[:, :, None], axis=0)
        weight = weight * shrink + tl.sum(scale, axis=0)
        peak = new_peak
    tl.store(
        out_base + inner,
        (acc / weight[:, None]).to(out_base.dtype.element_ty),
        mask=(groups < GROUP)[:, None] & dim_ok[None, :],
    )
