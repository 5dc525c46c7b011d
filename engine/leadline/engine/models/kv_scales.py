"""Scales for an FP8 KV cache, found by one run of the model and folded into its weights.

e4m3 holds magnitudes from 2**-9 to 448, with the same relative precision from 2**-6 up: a cache in FP8 wants
keys and values whose largest lie below 448 and whose bulk lies far above 2**-6. So each KV head gets a power
of two for its keys and one for its values, by the largest magnitudes of a run over CALIBRATION tokens.

Attention does not change when keys shrink and their queries grow, or when values shrink and the output
projection's columns grow; powers of two are exact in every float format. So the scales are multiplied into
the weights once, and neither the cache nor a kernel knows of them:

    rows of qkv    | q heads * 2**-k | k heads * 2**k | v heads * 2**v |      columns of o  * 2**-v

Where keys are normed by head (Qwen3), the norms' weights take the keys' scale, one for all heads of a layer.
Quantized weights keep their numbers, and their scales are multiplied. Those are scales of rows, so values of
a layer have one scale if its output projection is quantized.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from leadline.engine.models.decoder import Decoder, DecoderLayer

__all__ = ["CALIBRATION", "TARGET", "fold_kv_scales"]

CALIBRATION = 256
TARGET = 112.0
"""The largest magnitude seen comes to lie between half of this and this; what is larger in use has room up to
448 and saturates there."""


@torch.inference_mode()
def fold_kv_scales(model: Decoder) -> list[tuple[list[int], list[int]]]:
    """Call after the weights are in and before `finalize`. Returns each layer's exponents by KV head: what
    keys, and what values, are multiplied by is 2 to their power."""
    peaks = _peaks(model)
    exponents = []
    for layer, (keys, values) in zip(model.layers, peaks, strict=True):
        key_exponents = [_exponent(peak) for peak in keys]
        if layer.k_norm is not None:
            key_exponents = [min(key_exponents)] * len(key_exponents)
        value_exponents = [_exponent(peak) for peak in values]
        if not layer.o.is_plain:
            value_exponents = [min(value_exponents)] * len(value_exponents)
        _fold(layer, model.head_dim, key_exponents, value_exponents)
        exponents.append((key_exponents, value_exponents))
    return exponents


def _exponent(peak: float) -> int:
    """Largest e with peak * 2**e <= TARGET, within what 16-bit weights bear."""
    return 0 if peak == 0 else max(-8, min(8, math.floor(math.log2(TARGET / peak))))


def _peaks(model: Decoder) -> list[tuple[list[float], list[float]]]:
    """Largest magnitudes of keys and of values, by layer and KV head."""
    length = min(CALIBRATION, model.rope_tables[0][0].shape[0])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.vocab_size, (length,), generator=generator).to(model.device)
    peaks: list[tuple[list[float], list[float]]] = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        peaks.append((k.abs().amax(dim=(0, 2)).tolist(), v.abs().amax(dim=(0, 2)).tolist()))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=model.attention_scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out[0].transpose(0, 1).contiguous()

    model.forward(ids, torch.arange(length, device=model.device), attend)
    return peaks


def _fold(layer: DecoderLayer, dim: int, keys: list[int], values: list[int]) -> None:
    group = layer.num_heads // layer.num_kv_heads
    k_scale, v_scale = [2.0**e for e in keys], [2.0**e for e in values]
    if layer.q_norm is not None and layer.k_norm is not None:
        layer.q_norm.weight.div_(k_scale[0])
        layer.k_norm.weight.mul_(k_scale[0])
        rows = [1.0] * (layer.num_heads + layer.num_kv_heads) + v_scale
    else:
        rows = [1.0 / scale for scale in k_scale for _ in range(group)] + k_scale + v_scale
    device = layer.qkv.weight.device
    by_row = torch.tensor(rows, device=device).repeat_interleave(dim)
    layer.qkv.multiply_rows(by_row)
    if layer.qkv.bias is not None:
        layer.qkv.bias.mul_(by_row)
    if not layer.o.is_plain:
        layer.o.multiply_rows(torch.full((layer.o.shape[0],), 1.0 / v_scale[0], device=device))
        return
    columns = torch.tensor([1.0 / scale for scale in v_scale for _ in range(group)], device=device)
    layer.o.weight.mul_(columns.repeat_interleave(dim))
