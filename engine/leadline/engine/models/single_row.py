"""The decoder's layers for a step of one row on one GPU, in six kernels a layer instead of eleven.

    residual ─▶ norm + qkv ─▶ norm heads, rotate, write KV ─▶ attend ─▶ o + residual
             ─▶ norm + gate, up, silu, mul ─▶ down + residual

Same weights and the same cache as `Decoder.forward`; the sums are rounded to the model's dtype less often.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from leadline.engine.models.base import AttentionFn, KVWrite
from leadline.engine.models.triton_gemv import gemv

if TYPE_CHECKING:
    from leadline.engine.models.decoder import Decoder

__all__ = ["can_run_single_rows", "single_row_layers"]


def can_run_single_rows(model: Decoder) -> bool:
    """One rank, 16-bit weights on CUDA, no biases."""
    layer = model.layers[0]
    linears = (layer.qkv, layer.o, layer.gate_up, layer.down)
    return (
        model.tp.size == 1
        and model.device.type == "cuda"
        and model.dtype in (torch.float16, torch.bfloat16)
        and model.ops.writes_kv
        and all(linear.bias is None for linear in linears)
    )


def single_row_layers(
    model: Decoder,
    residual: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    attend: AttentionFn,
    write: KVWrite,
) -> torch.Tensor:
    """residual [1, hidden], overwritten → hidden state [1, hidden] after the final norm."""
    eps = model.config.rms_norm_eps
    for layer in model.layers:
        qkv = gemv(residual, layer.qkv.weight, norm=(layer.input_norm.weight, eps))
        q, k, v = layer.rotate(qkv, cos, sin, write)
        attended = attend(layer.index, q, k, v).reshape(1, -1)
        gemv(attended, layer.o.weight, residual=residual)
        act = gemv(residual, layer.gate_up.weight, norm=(layer.post_norm.weight, eps), gated=True)
        gemv(act, layer.down.weight, residual=residual)
    return model.ops.rms_norm(residual, model.norm.weight, eps)
