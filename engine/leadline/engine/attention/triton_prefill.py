"""Paged causal prefill attention in Triton: chunks of new tokens that stand at the end of their context.

One CTA a (block of query tokens, query head). The list of query blocks is made on the device from the row
boundaries, last block of a row first (it has the most keys), so nothing here depends on lengths the host
knows.

    keys of a row    |<------- all queries of the block see them ------->|<- diagonal and end ->|
                     0                                          full_end (multiple of TILE)    end
                     unmasked loop: every row is written                  masked loop

In a layer with a window the keys begin at the first that any query of the block sees, and those that some
query does not see are masked too.

A few query blocks after a long prefix would leave part of the GPU idle. Their keys are then split over up to
SPLITS CTAs with at least LEAST_KEYS keys each, which write a normalised partial output and its base-2
log-sum-exp; the last to arrive merges them in order, as in triton_decode.py.

Invariant: no key at or past the row's context length is loaded (NaN in unwritten cache rows cannot reach
the result).
"""

from __future__ import annotations

import triton
import triton.language as tl

from leadline.engine.attention.triton_decode import tanh

__all__ = ["prefill_items_kernel", "prefill_kernel"]


@triton.jit(do_not_specialize=["first_row", "num_rows"], do_not_specialize_on_alignment=["cu_q"])
def prefill_items_kernel(
    cu_q,
    items,
    meta,
    first_row,
    num_rows,
    QUERIES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Program i lists the query blocks of row first_row + i as `row | block << 16`; meta = [number of items].

    Rows first_row .. first_row + num_rows - 1 are the chunks. At most (their tokens) // QUERIES + num_rows
    items.
    """
    mine = tl.program_id(0)
    rows = tl.arange(0, BLOCK_ROWS)
    ok = rows < num_rows
    begins = tl.load(cu_q + first_row + rows, mask=ok, other=0)
    ends = tl.load(cu_q + first_row + rows + 1, mask=ok, other=0)
    counts = tl.cdiv(ends - begins, QUERIES)
    first = tl.sum(tl.where(rows < mine, counts, 0), axis=0)
    count = tl.sum(tl.where(rows == mine, counts, 0), axis=0)
    lanes = tl.arange(0, 128)
    for start in range(0, count, 128):
        index = start + lanes
        block = count - 1 - index
        tl.store(items + first + index, (first_row + mine) | (block << 16), mask=index < count)
    if mine == 0:
        tl.store(meta, tl.sum(counts, axis=0))


@triton.jit
def _tile(
    start,
    end,
    q_tile,
    positions,
    peak,
    weight,
    acc,
    table,
    k_cache,
    v_cache,
    page_stride,
    head,
    scale_log2,
    cap_scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM_TILE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold keys [start, start + TILE) into the running softmax; MASKED cuts at `end`, at each query's
    position and where its window begins."""
    lanes = tl.arange(0, TILE)
    dims = tl.arange(0, DIM_TILE)
    keys = start + lanes
    live = keys < end
    if BLOCK_SIZE >= TILE:
        # A tile lies within one block: one page number.
        page = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        base = page * page_stride + (start % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM) + head * HEAD_DIM
        offsets = base + (lanes[:, None] * (KV_HEADS * HEAD_DIM) + dims[None, :])
    else:
        pages = tl.load(table + keys // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        bases = pages * page_stride + (keys % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM) + head * HEAD_DIM
        offsets = bases[:, None] + dims[None, :]
    if MASKED:
        if WINDOW:
            # What was in the cache before any window of these queries never reaches the result either.
            live = live & (keys > tl.min(positions, axis=0) - WINDOW)
        mask = live[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_cache + offsets, mask=mask, other=0.0)
        v = tl.load(v_cache + offsets, mask=mask, other=0.0)
    elif HEAD_DIM != DIM_TILE:
        mask = (dims < HEAD_DIM)[None, :]
        k = tl.load(k_cache + offsets, mask=mask, other=0.0)
        v = tl.load(v_cache + offsets, mask=mask, other=0.0)
    else:
        k = tl.load(k_cache + offsets)
        v = tl.load(v_cache + offsets)
    k, v = k.to(q_tile.dtype), v.to(q_tile.dtype)
    scores = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION)
    if CAPPED:
        scores = tanh(scores * cap_scale)
    if MASKED:
        seen = keys[None, :] <= positions[:, None]
        if WINDOW:
            seen = seen & (keys[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1) * scale_log2)
    if MASKED:
        # A query may see no key of this CTA's part: keep -inf - -inf out of the exponentials.
        new_peak = tl.maximum(new_peak, -1e30)
    shrink = tl.exp2(peak - new_peak)
    probs = tl.exp2(scores * scale_log2 - new_peak[:, None])
    weight = weight * shrink + tl.sum(probs, axis=1)
    acc = tl.dot(probs.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return new_peak, weight, acc


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_tables", "cu_q", "context_lens"],
)
def prefill_kernel(
    q,
    k_cache,
    v_cache,
    out,
    block_tables,
    cu_q,
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
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST_KEYS: tl.constexpr,
):
    """q [T, HEADS, HEAD_DIM] with q_stride elements a token; out contiguous; caches as in triton_decode.

    scale_log2 must be positive: the maximum is taken before scaling. WINDOW 0: none. CAPPED: logits are
    tanh(cap_scale * q·k), before scale_log2. With SPLITS > 1: part_out float32
    [items, HEADS, SPLITS, QUERIES, HEAD_DIM], part_lse float32 [items, HEADS, SPLITS, QUERIES], arrived int32
    [items, HEADS], zero before and after.
    """
    pid = tl.program_id(0)
    part = tl.program_id(1)
    item = pid // HEADS
    head = pid % HEADS
    kv_head = head // (HEADS // KV_HEADS)
    packed = tl.load(items + item)
    if item >= tl.load(meta):
        return
    row = packed & 0xFFFF
    block = packed >> 16
    q_begin = tl.load(cu_q + row)
    q_len = tl.load(cu_q + row + 1) - q_begin
    context = tl.load(context_lens + row)

    queries = block * QUERIES + tl.arange(0, QUERIES)
    dims = tl.arange(0, DIM_TILE)
    positions = context - q_len + queries
    q_mask = (queries < q_len)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (q_begin + queries).to(tl.int64)
    q_tile = tl.load(q + tokens[:, None] * q_stride + head * HEAD_DIM + dims[None, :], mask=q_mask, other=0.0)
    if k_cache.dtype.element_ty == tl.float8e4nv:
        q_tile = q_tile.to(tl.float16)  # what the hardware turns e4m3 into
    table = block_tables + row.to(tl.int64) * table_stride

    first_position = context - q_len + block * QUERIES
    full_end = (first_position + 1) // TILE * TILE
    end = tl.minimum(first_position + QUERIES, context)
    first = 0
    if WINDOW:
        first = tl.maximum(first_position + 1 - WINDOW, 0) // TILE * TILE
    # This CTA's part of the keys, in whole tiles; all of them if there is one part.
    parts = tl.maximum(tl.minimum((end - first) // LEAST_KEYS, SPLITS), 1)
    if part >= parts:
        return
    length = tl.cdiv(tl.cdiv(end - first, TILE), parts) * TILE
    low = first + part * length
    high = tl.minimum(low + length, end)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM_TILE], tl.float32)
    if WINDOW:
        # The tiles that the window of some query does not hold as a whole.
        edge = tl.cdiv(tl.maximum(first_position + QUERIES - WINDOW, 0), TILE) * TILE
        edge = tl.minimum(edge, full_end)
        for start in range(low, tl.minimum(edge, high), TILE):
            peak, weight, acc = _tile(
                start, end, q_tile, positions, peak, weight, acc, table, k_cache, v_cache, page_stride,
                kv_head, scale_log2, cap_scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE, DIM_TILE, TILE, PRECISION,
                WINDOW, CAPPED, True,
            )  # fmt: skip
        low = tl.maximum(edge, low)
    for start in range(low, tl.minimum(full_end, high), TILE):
        peak, weight, acc = _tile(
            start, end, q_tile, positions, peak, weight, acc, table, k_cache, v_cache, page_stride, kv_head,
            scale_log2, cap_scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE, DIM_TILE, TILE, PRECISION, WINDOW, CAPPED,
            False,
        )  # fmt: skip
    for start in range(tl.maximum(full_end, low), high, TILE):
        peak, weight, acc = _tile(
            start, end, q_tile, positions, peak, weight, acc, table, k_cache, v_cache, page_stride, kv_head,
            scale_log2, cap_scale, KV_HEADS, HEAD_DIM, BLOCK_SIZE, DIM_TILE, TILE, PRECISION, WINDOW, CAPPED,
            True,
        )  # fmt: skip
    out_at = out + tokens[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + dims[None, :]
    if parts == 1:
        tl.store(out_at, (acc / weight[:, None]).to(out.dtype.element_ty), mask=q_mask)
    else:
        lanes = tl.arange(0, QUERIES)
        place = (item.to(tl.int64) * HEADS + head) * SPLITS
        inner = lanes[:, None] * HEAD_DIM + dims[None, :]
        dim_mask = (dims < HEAD_DIM)[None, :] & (lanes >= 0)[:, None]
        result = acc / tl.where(weight > 0.0, weight, 1.0)[:, None]
        tl.store(part_out + (place + part) * (QUERIES * HEAD_DIM) + inner, result, mask=dim_mask)
        lse = tl.where(weight > 0.0, peak + tl.log2(weight), float("-inf"))
        tl.store(part_lse + (place + part) * QUERIES + lanes, lse)
        # All threads' partial stores come before the release of the one atomic (barrier, then acq_rel).
        tl.debug_barrier()
        counter = arrived + item * HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
            tl.store(counter, 0)
            top = tl.full([QUERIES], float("-inf"), tl.float32)
            for other in range(parts):
                lse = tl.load(part_lse + (place + other) * QUERIES + lanes, cache_modifier=".cg")
                top = tl.maximum(top, lse)
            # Queries past the row's end saw no key at all.
            top = tl.maximum(top, -1e30)
            weight = tl.zeros([QUERIES], tl.float32)
            acc = tl.zeros([QUERIES, DIM_TILE], tl.float32)
            for other in range(parts):
                lse = tl.load(part_lse + (place + other) * QUERIES + lanes, cache_modifier=".cg")
                share = tl.exp2(lse - top)
                value = tl.load(
                    part_out + (place + other) * (QUERIES * HEAD_DIM) + inner,
                    mask=dim_mask,
                    other=0.0,
                    cache_modifier=".cg",
                )
                acc += value * share[:, None]
                weight += share
            tl.store(out_at, (acc / weight[:, None]).to(out.dtype.element_ty), mask=q_mask)
