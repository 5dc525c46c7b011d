"""Matrix-vector products of a decode step with one row, fused with what stands before and after them.

    out = [+ residual] W [norm](x)          out = silu(G [norm](x)) * (U [norm](x)),  W = | G |
                                                                                          | U |
One row leaves the tensor cores nothing to do: the time is that of reading W once, in FP8 half of it (each row
of W has a scale then, applied to the sum). A program makes a few
outputs and reads their whole rows of W with plain loads; a product takes hundreds to thousands of programs,
most of them in flight at once. The norm costs no pass of its own: every program reads all of x anyway, and
the factor 1 / rms(x) is applied to the sum.

Programs of one kernel start while those of the kernel before still run (programmatic dependent launch): they
fetch their first tile of W, which depends on nobody, and only then wait for x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["gemv", "gemv_kernel"]

_LARGEST_TILE = 2048


@triton.jit
def gemv_kernel(
    x, weight, scales, norm_weight, residual, out, eps, num_out,
    WIDTH: tl.constexpr, TILE: tl.constexpr, OUTS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Program i: outputs [i * OUTS, (i + 1) * OUTS). weight [num_out (twice if GATED), WIDTH], x [WIDTH].

    scales float32, one a row of weight, if SCALED; norm_weight [WIDTH] if NORM; residual [num_out] if ADD,
    may be out.
    """
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    live = outs < num_out
    lanes = tl.arange(0, TILE)
    inside = lanes < WIDTH
    at = weight + outs.to(tl.int64)[:, None] * WIDTH + lanes[None, :]
    mask = live[:, None] & inside[None, :]
    second = num_out.to(tl.int64) * WIDTH
    tile = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        up_tile = tl.load(at + second, mask=mask, other=0.0, eviction_policy="evict_first")
    if NORM:
        scale = tl.load(norm_weight + lanes, mask=inside, other=0.0).to(tl.float32)
    gdc_launch_dependents()
    gdc_wait()
    total = tl.zeros([OUTS], tl.float32)
    up_total = tl.zeros([OUTS], tl.float32)
    squares = 0.0
    for start in tl.static_range(0, WIDTH, TILE):
        if start > 0:
            inside = start + lanes < WIDTH
            mask = live[:, None] & inside[None, :]
            tile = tl.load(at + start, mask=mask, other=0.0, eviction_policy="evict_first")
            if GATED:
                up_tile = tl.load(at + second + start, mask=mask, other=0.0, eviction_policy="evict_first")
            if NORM:
                scale = tl.load(norm_weight + start + lanes, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + start + lanes, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(value * value, axis=0)
            value *= scale
        total += tl.sum(tile.to(tl.float32) * value[None, :], axis=1)
        if GATED:
            up_total += tl.sum(up_tile.to(tl.float32) * value[None, :], axis=1)
    if SCALED:
        total *= tl.load(scales + outs, mask=live, other=0.0)
        if GATED:
            up_total *= tl.load(scales + num_out + outs, mask=live, other=0.0)
    if NORM:
        inverse = tl.rsqrt(squares / WIDTH + eps)
        total *= inverse
        up_total *= inverse
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * up_total
    if ADD:
        total += tl.load(residual + outs, mask=live, other=0.0).to(tl.float32)
    tl.store(out + outs, total.to(out.dtype.element_ty), mask=live)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    cut: tuple[int, int, int] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [1, in] (contiguous) times weight [out, in] → [1, out], or [1, out / 2] if `gated`.

    scales: float32 [out, 1] of a weight in FP8. norm: weight [in] and epsilon of an RMSNorm of x. residual
    [1, out] is added to and overwritten: it is the result. cut: (columns a tile, outputs a program, warps);
    the default is by trial on an H200 (benchmarks/gpu_skinny.py --rows 1 --tune). out [1, out]: where the
    result goes, if not in `residual`.
    """
    rows, width = weight.shape
    num_out = rows // 2 if gated else rows
    if residual is not None:
        out = residual
    elif out is None:
        out = x.new_empty((1, num_out))
    norm_weight, eps = norm if norm is not None else (x, 0.0)
    if cut is None:
        tile = min(triton.next_power_of_2(width), _LARGEST_TILE)
        cut = (tile, 4 if not gated or tile <= 1024 else 2, 4)
    tile, outs, warps = cut
    gemv_kernel[(triton.cdiv(num_out, outs),)](
        x,
        weight,
        out if scales is None else scales,
        norm_weight,
        out,
        out,
        eps,
        num_out,
        WIDTH=width,
        TILE=tile,
        OUTS=outs,
        NORM=norm is not None,
        GATED=gated,
        ADD=residual is not None,
        SCALED=scales is not None,
        num_warps=warps,
        launch_pdl=True,
    )
    return out
