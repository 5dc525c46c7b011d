"""Mixtures of experts as Triton kernels. How many tokens an expert has is known on the device only, so that a
step can be captured:

    choose    softmax of the router's logits, the best TOP experts of a token, how many tokens each has got
    place     pairs (token, expert) in the order of experts, and each expert's tiles of ROWS pairs
    product   silu(x gateᵀ) * (x upᵀ) of each pair; again with down, times the pair's weight

Pair p is choice p % TOP of token p // TOP. A program of `product` finds its tile's expert by itself; programs
beyond the last tile have nothing to do. In which order an expert's pairs are placed is chance, and no pair's
result depends on it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

__all__ = ["experts", "top_of"]

_PAIRS = 64
"""A program of `place`"""


@triton.jit
def top_of(
    logits, EXPERTS: tl.constexpr, TILE: tl.constexpr, TOP: tl.constexpr, TOP_TILE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """The best TOP of logits [EXPERTS], and their softmax: int32 and float32 [TOP_TILE]."""
    lanes = tl.arange(0, TILE)
    ranks = tl.arange(0, TOP_TILE)
    score = tl.load(logits + lanes, mask=lanes < EXPERTS, other=float("-inf")).to(tl.float32)
    odds = tl.exp(score - tl.max(score, axis=0))
    total = tl.sum(odds, axis=0)
    odds = tl.where(lanes < EXPERTS, odds, -1.0)
    best = tl.zeros([TOP_TILE], tl.float32)
    which = tl.zeros([TOP_TILE], tl.int32)
    for rank in tl.static_range(TOP):
        index = tl.argmax(odds, axis=0).to(tl.int32)
        best = tl.where(ranks == rank, tl.max(odds, axis=0), best)
        which = tl.where(ranks == rank, index, which)
        odds = tl.where(lanes == index, -1.0, odds)
    if RENORMALIZE:
        total = tl.sum(best, axis=0)
    return which, best / total


@triton.jit
def _choose_kernel(
    logits, chosen, weights, counts, stride, EXPERTS: tl.constexpr, TILE: tl.constexpr, TOP: tl.constexpr,
    TOP_TILE: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """Program row. chosen int32, weights float32 [T, TOP]; counts int32 [EXPERTS] grow."""
    row = tl.program_id(0).to(tl.int64)
    which, share = top_of(logits + row * stride, EXPERTS, TILE, TOP, TOP_TILE, RENORMALIZE)
    ranks = tl.arange(0, TOP_TILE)
    tl.store(chosen + row * TOP + ranks, which, mask=ranks < TOP)
    tl.store(weights + row * TOP + ranks, share, mask=ranks < TOP)
    tl.atomic_add(counts + which, 1, mask=ranks < TOP)


@triton.jit
def _place_kernel(
    chosen, counts, cursors, starts, tile_ends, order, pairs, EXPERTS: tl.constexpr, TILE: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program i: pairs [i * PAIRS, (i + 1) * PAIRS). starts, tile_ends int32 [EXPERTS]; cursors are zero."""
    lanes = tl.arange(0, TILE)
    count = tl.load(counts + lanes, mask=lanes < EXPERTS, other=0)
    if tl.program_id(0) == 0:
        tl.store(starts + lanes, tl.cumsum(count, axis=0) - count, mask=lanes < EXPERTS)
        tiles = (count + ROWS - 1) // ROWS
        tl.store(tile_ends + lanes, tl.cumsum(tiles, axis=0), mask=lanes < EXPERTS)
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    live = pair < pairs
    expert = tl.load(chosen + pair, mask=live, other=0)
    before = tl.sum(tl.where(lanes[None, :] < expert[:, None], count[None, :], 0), axis=1)
    at = tl.atomic_add(cursors + expert, 1, mask=live)
    tl.store(order + before + at, pair, mask=live)


@triton.jit
def _product_kernel(
    x, matrices, scales, weights, out, order, counts, starts, tile_ends, IN: tl.constexpr, OUT: tl.constexpr,
    EXPERTS: tl.constexpr, TILE: tl.constexpr, TOP: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [pairs, OUT]. GATED: x [T, IN], matrices [EXPERTS, 2 OUT, IN]; else x [pairs, IN], matrices
    [EXPERTS, OUT, IN], times weights [pairs]. SCALED: matrices in FP8, scales float32, one a row of them."""
    columns: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // columns
    column = tl.program_id(0) % columns * COLUMNS + tl.arange(0, COLUMNS)
    lanes = tl.arange(0, TILE)
    ends = tl.load(tile_ends + lanes, mask=lanes < EXPERTS, other=1 << 30)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    if expert < EXPERTS:
        first = tl.max(tl.where(lanes < expert, ends, 0), axis=0)
        row = (tile - first) * ROWS + tl.arange(0, ROWS)
        live = row < tl.load(counts + expert)
        pair = tl.load(order + tl.load(starts + expert) + row, mask=live, other=0).to(tl.int64)
        source = pair // TOP if GATED else pair
        depth = tl.arange(0, DEPTH)
        height: tl.constexpr = 2 * OUT if GATED else OUT
        here = x + source[:, None] * IN + depth[None, :]
        matrix = matrices + expert.to(tl.int64) * (height * IN) + column[None, :] * IN + depth[:, None]
        inside = column[None, :] < OUT
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, IN, DEPTH):
            rest = IN - begin
            a = tl.load(here + begin, mask=live[:, None] & (depth[None, :] < rest), other=0.0)
            mask = inside & (depth[:, None] < rest)
            b = tl.load(matrix + begin, mask=mask, other=0.0).to(a.dtype)
            total = tl.dot(a, b, total, input_precision=PRECISION)
            if GATED:
                b = tl.load(matrix + begin + OUT * IN, mask=mask, other=0.0).to(a.dtype)
                up = tl.dot(a, b, up, input_precision=PRECISION)
        if SCALED:
            scale = scales + expert * height + column
            total *= tl.load(scale, mask=column < OUT, other=0.0)[None, :]
            if GATED:
                up *= tl.load(scale + OUT, mask=column < OUT, other=0.0)[None, :]
        if GATED:
            total = total / (1.0 + tl.exp(-total)) * up
        else:
            total *= tl.load(weights + pair, mask=live, other=0.0)[:, None]
        target = out + pair[:, None] * OUT + column[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=live[:, None] & inside)


def experts(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top: int,
    renormalize: bool,
    out: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    routing: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """`models.ops.experts`."""
    tokens, hidden = x.shape
    count, inner = router.shape[0], down.shape[2]
    pairs, tile = tokens * top, triton.next_power_of_2(count)
    if not pairs:
        return x.new_zeros(x.shape) if out is None else out
    rows, columns, depth, warps, stages = _tiles(pairs / count, x.dtype)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=x.device)

    counts, cursors = torch.zeros((2, count), dtype=torch.int32, device=x.device)
    order, starts, tile_ends = numbers(pairs), numbers(count), numbers(count)
    if routing is None:
        chosen, weights = _choose(x, router, counts, top, renormalize)
    else:
        chosen, weights = routing[0].to(torch.int32), routing[1].float()
        counts.scatter_add_(0, routing[0].flatten(), torch.ones_like(order))
    _place_kernel[(triton.cdiv(pairs, _PAIRS),)](
        chosen,
        counts,
        cursors,
        starts,
        tile_ends,
        order,
        pairs,
        EXPERTS=count,
        TILE=tile,
        PAIRS=_PAIRS,
        ROWS=rows,
        num_warps=4,
    )
    most = triton.cdiv(pairs, rows) + min(count, pairs)

    def product(
        source: torch.Tensor,
        matrices: torch.Tensor,
        scale: torch.Tensor | None,
        width: int,
        gated: bool,
    ) -> torch.Tensor:
        made = x.new_empty((pairs, width))
        _product_kernel[(most * triton.cdiv(width, columns),)](
            source,
            matrices,
            weights if scale is None else scale,
            weights,
            made,
            order,
            counts,
            starts,
            tile_ends,
            IN=source.shape[1],
            OUT=width,
            EXPERTS=count,
            TILE=tile,
            TOP=top,
            GATED=gated,
            SCALED=scale is not None,
            ROWS=rows,
            COLUMNS=columns,
            DEPTH=depth,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=warps,
            num_stages=stages,
        )
        return made

    wide, tall = scales or (None, None)
    inside = product(x.contiguous(), gate_up, wide, inner, True)
    terms = product(inside, down, tall, hidden, False).view(tokens, top, hidden)
    return torch.sum(terms, dim=1) if out is None else torch.sum(terms, dim=1, out=out)


def _choose(
    x: torch.Tensor, router: torch.Tensor, counts: torch.Tensor, top: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, int32 [T, top], and their weights, float32 [T, top]; `counts` grow."""
    tokens, count = len(x), router.shape[0]
    chosen = torch.empty((tokens, top), dtype=torch.int32, device=x.device)
    weights = torch.empty((tokens, top), dtype=torch.float32, device=x.device)
    logits = F.linear(x, router)
    _choose_kernel[(tokens,)](
        logits,
        chosen,
        weights,
        counts,
        logits.stride(0),
        EXPERTS=count,
        TILE=triton.next_power_of_2(count),
        TOP=top,
        TOP_TILE=triton.next_power_of_2(top),
        RENORMALIZE=renormalize,
        num_warps=1,
    )
    return chosen, weights


def _tiles(pairs_an_expert: float, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """(rows, columns, depth, warps, pipeline stages) of a program of `product`, by trial on an H200 with 128
    experts of 768 columns."""
    if dtype == torch.float32:
        return 16, 32, 32, 4, 2
    if pairs_an_expert < 16:
        return 16, 32, 128, 4, 4
    if pairs_an_expert <= 64:
        return 64, 64, 64, 4, 3
    return 128, 64, 64, 8, 3
