"""Linears in FP8 (e4m3): weights with a scale a row, activations with a scale a token, made as they come.

    y[t, o] = a[t] * w[o] * sum_i  x8[t, i] * W8[o, i]        x8 = x / a,  a[t] = max |x[t]| / 448
                                                              W8 = W / w,  w[o] = max |W[o]| / 448

On a GPU with FP8 tensor cores that sum is torch._scaled_mm. Elsewhere the same values are rounded the same
way and multiplied in the model's dtype: a reference that shows what the format does to the answers, not
faster than no quantization at all.

The formats are those of Micikevicius et al., "FP8 formats for deep learning", 2022.
"""

from __future__ import annotations

import torch

from leadline.engine.errors import ConfigError

__all__ = ["FP8", "LARGEST", "check_fp8_linear", "has_fp8", "quantize_rows", "round_rows", "scaled_product"]

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
_LEAST_SCALE = 1e-12 / LARGEST


def has_fp8(device: torch.device) -> bool:
    """Whether the device multiplies FP8 matrices: compute capability 8.9 or more."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def check_fp8_linear(setting: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError, naming `setting`, where `scaled_product` does not work."""
    if device.type != "cuda":
        return
    if not has_fp8(device):
        raise ConfigError(
            f"{setting} needs a GPU with FP8 tensor cores (compute capability 8.9 or more: Ada, Hopper and "
            f"later); {torch.cuda.get_device_name(device)} has none"
        )
    if dtype != torch.bfloat16:
        raise ConfigError(f"{setting} works with dtype bfloat16 on a GPU, not {str(dtype).split('.')[1]}")


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, n] → e4m3 [R, n] and its scales, float32 [R, 1]. A row of zeros stays one."""
    if x.is_cuda:
        try:
            from leadline.engine.models.triton_fp8 import quantize_rows as fused
        except ImportError:
            pass
        else:
            return fused(x)
    wide = x.float()
    scale = (wide.abs().amax(dim=1, keepdim=True) / LARGEST).clamp_(min=_LEAST_SCALE)
    # The quotient may round to just above the largest: torch's conversion would make that a NaN.
    return (wide / scale).clamp_(-LARGEST, LARGEST).to(FP8), scale


def round_rows(x: torch.Tensor) -> torch.Tensor:
    """x as it comes back from `quantize_rows`, in its own dtype."""
    values, scale = quantize_rows(x)
    return (values.float() * scale).to(x.dtype)


def scaled_product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [T, in] bfloat16 on a GPU, weight e4m3 [out, in], scale float32 [out, 1] → [T, out] bfloat16. Widths
    are multiples of 16."""
    values, scales = quantize_rows(x)
    y: torch.Tensor = torch._scaled_mm(
        values, weight.t(), scale_a=scales, scale_b=scale.t(), out_dtype=x.dtype, use_fast_accum=True
    )
    return y if bias is None else y.add_(bias)
