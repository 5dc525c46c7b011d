"""Many rows times a weight in FP8 with a scale for each 128 columns: both factors in FP8.

    y[t, o] = sum over groups g of  a[t, g] * w[o, g] * sum over the columns i of g of  x8[t, i] * W8[o, i]

Activations get a scale for each token and 128 columns, as they come. Each group's sum leaves the tensor cores
before it is scaled, so that their short accumulators never add more than 128 products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["block_product", "quantize_groups"]

_GROUP = tl.constexpr(128)
_ORDERED_TOGETHER = tl.constexpr(8)
"""Blocks of rows whose programs run side by side, so that they read the same weights from the L2 cache."""


@triton.jit
def _quantize_kernel(x, values, scales, stride, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """Program row. x [rows, GROUPS * 128] with `stride` elements a row; scales [rows, GROUPS]."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, TILE)
    held = groups < GROUPS
    at = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    tile = tl.load(x + row * stride + at, mask=held[:, None], other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(tile), axis=1) / 448.0, 1e-12 / 448.0)
    rounded = tl.minimum(tl.maximum(tile / scale[:, None], -448.0), 448.0)
    line = row * (GROUPS * _GROUP)
    tl.store(values + line + at, rounded.to(values.dtype.element_ty), mask=held[:, None])
    tl.store(scales + row * GROUPS + groups, scale, mask=held)


def quantize_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, n], whose rows are contiguous and n a multiple of 128 → e4m3 [R, n] and float32 [R, n / 128]."""
    rows, width = x.shape
    groups = width // 128
    values = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    _quantize_kernel[(rows,)](
        x, values, scales, x.stride(0), GROUPS=groups, TILE=triton.next_power_of_2(groups), num_warps=8
    )
    return values, scales


@triton.jit(do_not_specialize=["rows"])
def block_kernel(
    x, x_scales, weight, scales, out, rows, num_out,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program: a block of rows and of outputs. x e4m3 [rows, GROUPS * 128], weight e4m3 [num_out, GROUPS *
    128], both with a scale for each row and group; out [rows, num_out]."""
    WIDTH: tl.constexpr = GROUPS * _GROUP
    across = tl.cdiv(num_out, OUTS)
    band = tl.program_id(0) // (_ORDERED_TOGETHER * across)
    first = band * _ORDERED_TOGETHER
    high = tl.minimum(tl.cdiv(rows, ROWS) - first, _ORDERED_TOGETHER)
    within = tl.program_id(0) % (_ORDERED_TOGETHER * across)
    lanes = (first + within % high) * ROWS + tl.arange(0, ROWS)
    outs = (within // high) * OUTS + tl.arange(0, OUTS)
    columns = tl.arange(0, _GROUP)
    row_at, out_at = tl.minimum(lanes, rows - 1).to(tl.int64), tl.minimum(outs, num_out - 1).to(tl.int64)
    x_at = x + row_at[:, None] * WIDTH + columns[None, :]
    w_at = weight + out_at[:, None] * WIDTH + columns[None, :]
    total = tl.zeros([ROWS, OUTS], tl.float32)
    for group in tl.range(0, GROUPS, num_stages=STAGES):
        left, right = tl.load(x_at + group * _GROUP), tl.load(w_at + group * _GROUP)
        part = tl.dot(left, tl.trans(right))
        a, w = tl.load(x_scales + row_at * GROUPS + group), tl.load(scales + out_at * GROUPS + group)
        total += part * a[:, None] * w[None, :]
    place = lanes.to(tl.int64)[:, None] * num_out + outs[None, :]
    mask = (lanes < rows)[:, None] & (outs < num_out)[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


def block_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    cut: tuple[int, int, int, int] | None = None,
) -> torch.Tensor:
    """x [T, n], whose rows are contiguous, times weight e4m3 [out, n] with scales float32 [out, n / 128] →
    [T, out]. cut: (rows of x and outputs a program, stages, warps)."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows = x.shape[0]
    values, x_scales = quantize_groups(x)
    num_out, width = weight.shape
    out = x.new_empty((rows, num_out))
    tile, outs, stages, warps = cut or ((64, 128, 4, 4) if rows <= 128 else (128, 128, 4, 8))
    block_kernel[(triton.cdiv(rows, tile) * triton.cdiv(num_out, outs),)](
        values,
        x_scales,
        weight,
        scales,
        out,
        rows,
        num_out,
        GROUPS=width // 128,
        ROWS=tile,
        OUTS=outs,
        STAGES=stages,
        num_warps=warps,
    )
    return out
