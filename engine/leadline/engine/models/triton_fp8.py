"""Activations to FP8 in one kernel: a row's largest magnitude, its scale, its rounded values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["quantize_rows"]


@triton.jit
def _quantize_kernel(x, values, scales, stride, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Program row. x [rows, WIDTH] with `stride` elements a row; values likewise, contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    mask = columns < WIDTH
    x_row = tl.load(x + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x_row), axis=0) / 448.0, 1e-12 / 448.0)
    rounded = tl.minimum(tl.maximum(x_row / scale, -448.0), 448.0)
    tl.store(values + row * WIDTH + columns, rounded.to(tl.float8e4nv), mask=mask)
    tl.store(scales + row, scale)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As models/fp8.py's, for x [R, n] on a GPU whose rows are contiguous."""
    rows, width = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    values = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        _quantize_kernel[(rows,)](
            x,
            values,
            scales,
            x.stride(0),
            WIDTH=width,
            TILE=triton.next_power_of_2(width),
            num_warps=8 if width > 2048 else 4,
        )
    return values, scales
