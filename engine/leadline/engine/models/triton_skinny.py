"""Matrix products of a decode step with few rows (2 to 64), fused with what stands before and after them.

Weights are the left operand, so that their rows fill the tensor cores' tile and the step's rows are the short
side; a program makes OUTS outputs of every row over a part of the width:

              ROWS                                parts of the width are summed in a fixed order by the
            +------+                              program that arrives last, so equal inputs give equal bits
      OUTS  |      |  = W [OUTS, width part] · xᵀ
            +------+

RMSNorm is split so that no program needs a whole row: who makes the residual also writes it scaled by the
next norm's weight, and its own share of the sum of squares; who reads it multiplies by 1 / rms at the end.

    o, down   residual += W x;  scaled = residual * norm weight;  squares[block] = sum of residual² there
    qkv       out = (W scaled) / rms          gate, up   out = silu(G scaled / rms) * (U scaled / rms)

Programs start while the kernel before still runs (programmatic dependent launch). Weights depend on nobody:
before it waits for x, a program loads the first NEAR columns of its weights and may ask for more of them to
be brought to the L2 cache.

    width part    | NEAR | DEPTH | DEPTH | ... through a pipeline of STAGES tiles |
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from leadline.engine.models.skinny_shapes import Shape

__all__ = ["MAX_ROWS", "Workspace", "enter_kernel", "skinny", "skinny_kernel"]

MAX_ROWS = 64
_MOST_PARTS = 256
"""Programs that `Shape.of` cuts a product into, if it splits the width."""


@triton.jit
def _prefetch(pointers):
    """Ask for the cache lines of these addresses; wait for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.uint64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["rows"])
def enter_kernel(
    residual, norm_weight, scaled, squares, rows, WIDTH: tl.constexpr, TILE: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program row: scaled = residual * norm_weight, the sum of squares in block 0 and zero in the others."""
    row = tl.program_id(0)
    lanes = tl.arange(0, TILE)
    mask = lanes < WIDTH
    value = tl.load(residual + row * WIDTH + lanes, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(norm_weight + lanes, mask=mask, other=0.0).to(tl.float32)
    tl.store(scaled + row * WIDTH + lanes, (value * scale).to(scaled.dtype.element_ty), mask=mask)
    total = tl.sum(value * value, axis=0)
    blocks = tl.arange(0, BLOCKS)
    tl.store(squares + blocks * ROWS + row, tl.where(blocks == 0, total, 0.0))


@triton.jit
def _finish(
    total, up_total, block, outs, lanes, rows, scales, squares, residual, norm_weight, out, scaled, eps,
    num_out, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The sums [OUTS, ROWS] → outputs."""
    mask = (outs < num_out)[:, None] & (lanes < rows)[None, :]
    if SCALED:
        total *= tl.load(scales + outs, mask=outs < num_out, other=0.0)[:, None]
        if GATED:
            up_total *= tl.load(scales + num_out + outs, mask=outs < num_out, other=0.0)[:, None]
    at = lanes.to(tl.int64)[None, :] * num_out + outs[:, None]
    kind = out.dtype.element_ty
    if NORM:
        blocks = tl.arange(0, BLOCKS)
        parts = tl.load(squares + blocks[:, None] * ROWS + lanes[None, :])
        inverse = tl.rsqrt(tl.sum(parts, axis=0) / WIDTH + eps)[None, :]
        total *= inverse
        if GATED:
            up_total *= inverse
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * up_total
    if ADD:
        total += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        rounded = total.to(kind)
        tl.store(residual + at, rounded, mask=mask)
        wide = tl.where(mask, rounded.to(tl.float32), 0.0)
        scale = tl.load(norm_weight + outs, mask=outs < num_out, other=0.0).to(tl.float32)
        tl.store(scaled + at, (wide * scale[:, None]).to(kind), mask=mask)
        tl.store(squares + block * ROWS + lanes, tl.sum(wide * wide, axis=0))
    else:
        tl.store(out + at, total.to(kind), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def skinny_kernel(
    x, weight, scales, squares, residual, norm_weight, out, scaled, partial, arrived, eps, rows, num_out,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, BLOCKS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    SCALED: tl.constexpr, PREFETCH: tl.constexpr, NEAR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, part of the width). x [rows, WIDTH] contiguous; weight [num_out (twice if
    GATED), WIDTH]; scales float32, one a row of weight, if SCALED; squares float32 [BLOCKS, ROWS], read if
    NORM, written if ADD; partial float32 [blocks, SPLITS, OUTS (twice if GATED), ROWS]; arrived int32
    [blocks], zero before and after."""
    block = tl.program_id(0)
    part = tl.program_id(1)
    LENGTH: tl.constexpr = WIDTH // SPLITS
    outs = block * OUTS + tl.arange(0, OUTS)
    lanes = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    begin = part * LENGTH
    safe = tl.minimum(outs, num_out - 1)
    w_at = weight + safe.to(tl.int64)[:, None] * WIDTH + begin
    second = num_out.to(tl.int64) * WIDTH
    if NEAR > 0:
        columns = tl.arange(0, NEAR)
        near = tl.load(w_at + columns[None, :], eviction_policy="evict_first")
        if GATED:
            up_near = tl.load(w_at + second + columns[None, :], eviction_policy="evict_first")
    if PREFETCH:
        lines = tl.arange(0, triton.next_power_of_2(LENGTH // 64)) * 64
        ahead = w_at + tl.minimum(lines, LENGTH - 1)[None, :]
        _prefetch(ahead)
        if GATED:
            _prefetch(ahead + second)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x_at = x + tl.minimum(lanes, rows - 1)[:, None] * WIDTH + begin
    if NEAR > 0:
        near_x = tl.load(x_at + columns[None, :])
    x_at += depth[None, :]
    w_at += depth[None, :]
    total = tl.zeros([OUTS, ROWS], tl.float32)
    up_total = tl.zeros([OUTS, ROWS], tl.float32)
    for start in tl.range(NEAR, LENGTH, DEPTH, num_stages=STAGES):
        tile = tl.load(w_at + start, eviction_policy="evict_first")
        right = tl.trans(tl.load(x_at + start))
        total = tl.dot(tile.to(right.dtype), right, total)
        if GATED:
            total_tile = tl.load(w_at + second + start, eviction_policy="evict_first")
            up_total = tl.dot(total_tile.to(right.dtype), right, up_total)
    if NEAR > 0:
        total = tl.dot(near.to(near_x.dtype), tl.trans(near_x), total)
        if GATED:
            up_total = tl.dot(up_near.to(near_x.dtype), tl.trans(near_x), up_total)
    if SPLITS == 1:
        _finish(
            total, up_total, block, outs, lanes, rows, scales, squares, residual, norm_weight, out, scaled,
            eps, num_out, WIDTH, ROWS, BLOCKS, NORM, GATED, ADD, SCALED,
        )  # fmt: skip
    else:
        HALVES: tl.constexpr = 2 if GATED else 1
        inner = tl.arange(0, OUTS)[:, None] * ROWS + lanes[None, :]
        mine = partial + (block * SPLITS + part) * (HALVES * OUTS * ROWS) + inner
        tl.store(mine, total)
        if GATED:
            tl.store(mine + OUTS * ROWS, up_total)
        # All threads' stores come before the release of the one atomic (barrier, then acq_rel).
        tl.debug_barrier()
        if tl.atomic_add(arrived + block, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrived + block, 0)
            first = partial + block * SPLITS * (HALVES * OUTS * ROWS) + inner
            total = tl.zeros([OUTS, ROWS], tl.float32)
            up_total = tl.zeros([OUTS, ROWS], tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(first + other * (HALVES * OUTS * ROWS), cache_modifier=".cg")
                if GATED:
                    up_total += tl.load(
                        first + other * (HALVES * OUTS * ROWS) + OUTS * ROWS, cache_modifier=".cg"
                    )
            _finish(
                total, up_total, block, outs, lanes, rows, scales, squares, residual, norm_weight, out,
                scaled, eps, num_out, WIDTH, ROWS, BLOCKS, NORM, GATED, ADD, SCALED,
            )  # fmt: skip


class Workspace:
    """What the products of one step hand each other; one for a model, since steps do not overlap."""

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self.blocks = triton.next_power_of_2(triton.cdiv(hidden, 32))
        self.squares = torch.zeros((self.blocks, MAX_ROWS), dtype=torch.float32, device=device)
        self.scaled = torch.zeros((MAX_ROWS, hidden), dtype=dtype, device=device)
        self.partial = torch.empty(8 * 32 * _MOST_PARTS * MAX_ROWS, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(4 * _MOST_PARTS, dtype=torch.int32, device=device)


def skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    space: Workspace,
    scales: torch.Tensor | None = None,
    *,
    eps: float = 0.0,
    norm: bool = False,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    next_norm: torch.Tensor | None = None,
    shape: Shape | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [R, in], 2 <= R <= 64, times weight [out, in] → [R, out], or [R, out / 2] if `gated`.

    scales: float32 [out, 1] of a weight in FP8. norm: x is `space.scaled`, to be divided by the rms of the
    residual it came from. residual [R, out] is added to and overwritten, and `space.scaled` and
    `space.squares` are made of it with next_norm [out]. out: where the result goes, if not in `residual`.
    """
    rows, width = x.shape
    num_out = weight.shape[0] // 2 if gated else weight.shape[0]
    shape = shape or Shape.of(num_out, width, gated, rows)
    if residual is not None:
        out = residual
    elif out is None:
        out = x.new_empty((rows, num_out))
    tile = max(16, triton.next_power_of_2(rows))
    blocks = triton.cdiv(num_out, shape.outs)
    if (
        (width // shape.splits - shape.near) % shape.depth
        or width % shape.splits
        or width // shape.splits < shape.near
    ):
        raise ValueError(f"{shape} does not divide {width} columns")
    needed = blocks * shape.splits * shape.outs * tile * (2 if gated else 1)
    if shape.splits > 1 and (needed > space.partial.numel() or blocks > space.arrived.numel()):
        raise ValueError(f"{shape} needs a larger workspace for {num_out} outputs of {rows} rows")
    skinny_kernel[(blocks, shape.splits)](
        x,
        weight,
        space.squares if scales is None else scales,
        space.squares,
        out,
        x if next_norm is None else next_norm,
        out,
        space.scaled,
        space.partial,
        space.arrived,
        eps,
        rows,
        num_out,
        WIDTH=width,
        ROWS=tile,
        OUTS=shape.outs,
        DEPTH=shape.depth,
        SPLITS=shape.splits,
        STAGES=shape.stages,
        BLOCKS=space.blocks,
        NORM=norm,
        GATED=gated,
        ADD=residual is not None,
        SCALED=scales is not None,
        PREFETCH=shape.prefetch and x.is_cuda,
        NEAR=shape.near,
        PDL=x.is_cuda,
        num_warps=shape.warps,
        **({"launch_pdl": True} if x.is_cuda else {}),
    )
    return out
