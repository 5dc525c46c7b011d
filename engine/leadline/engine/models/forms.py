"""Decides how each linear keeps its weight on its device, and allocates it, before the weights are read.

| the checkpoint has          | on a CPU           | on a GPU                                              |
| plain floats                | plain              | plain                                                 |
| the same, quantization fp8  | rounded (reference)| FP8, a scale a row                                    |
| FP8, scales of rows, tensor | dequantized        | FP8, a scale a row; dequantized without FP8 cores     |
| FP8 in blocks, 4 or 8 bits  | dequantized        | groups of columns (grouped.py); FP8 and NVFP4         |
|                             |                    | dequantized without FP8 cores                         |

Experts have two forms on a GPU: FP8 with a scale a row, and plain. What has no form of its own is dequantized
into the model's type while it is read.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch

from leadline.engine.errors import ConfigError
from leadline.engine.models.decoder import Decoder
from leadline.engine.models.fp8 import has_fp8
from leadline.engine.models.layers import ColumnLinear, Form, RowLinear
from leadline.engine.models.quantized_config import Layout, StoredAs, can_group

__all__ = ["allocate_matrices"]


def allocate_matrices(
    model: Decoder, stored: Callable[[str], StoredAs | None], quantization: str | None
) -> None:
    """Allocate the linears and experts of a model that was built with `matrices_later`.

    stored: how the checkpoint has the weight of a module; None: plainly. Raises ConfigError for widths that
    FP8 products do not take, and for groups that cannot be split over the ranks.
    """
    for layer in model.layers:
        prefix = f"model.layers.{layer.index}"
        for name, linear in layer.named_linears(prefix):
            found = [stored(module) for module in linear.modules(name)]
            linear.keep(_form(linear, found, quantization, model.device, name), model.device)
        if layer.experts is not None:
            names, numbers = layer.experts.config.names, range(layer.experts.config.count)
            found = [
                stored(f"{prefix}.{names.experts}.{number}.{name}")
                for number in numbers
                for name in (names.gate, names.up, names.down)
            ]
            form = _plain_form(model.device, quantization)
            if _are_fp8_rows(found) and _multiplies_fp8(model.device, model.dtype):
                form = Form.FP8
            layer.experts.keep(form, model.device)


def _form(
    linear: ColumnLinear | RowLinear,
    stored: Sequence[StoredAs | None],
    quantization: str | None,
    device: torch.device,
    name: str,
) -> Form | StoredAs:
    first, shape = stored[0], linear.weight.shape
    if quantization is not None and _is_gpu(device) and any(size % 16 for size in shape):
        raise ConfigError(
            "quantization 'fp8' needs projections whose widths are multiples of 16; one here is "
            f"{shape[1]} to {shape[0]}"
        )
    if first is None or any(other != first for other in stored) or not _is_gpu(device):
        return _plain_form(device, quantization)
    if _are_fp8_rows(stored):
        fits = _multiplies_fp8(device, linear.dtype) and not any(size % 16 for size in shape)
        return Form.FP8 if fits else Form.PLAIN
    if not _multiplies_groups(linear.dtype) or not can_group(shape[1]):
        return Form.PLAIN
    if (first.layout is Layout.FP8 or first.global_scale) and not has_fp8(device):
        return Form.PLAIN  # kernels there cannot read its numbers, or its scales
    _check_groups(linear, first, name)
    return first


def _check_groups(linear: ColumnLinear | RowLinear, stored: StoredAs, name: str) -> None:
    """Raise ConfigError if this rank's columns cannot be kept in groups."""
    if not isinstance(linear, RowLinear) or linear.tp.size == 1:
        return
    if stored.ordered:
        raise ConfigError(
            f"quantization_config.desc_act: {name} has its groups out of order (g_idx) and cannot be split "
            f"over {linear.tp.size} ranks; use tensor_parallel 1"
        )
    if stored.group and (linear.columns.start % stored.group or linear.columns.count % stored.group):
        raise ConfigError(
            f"tensor_parallel {linear.tp.size} cuts {name} inside a group of {stored.group} columns that "
            "share a scale; use fewer ranks"
        )


def _plain_form(device: torch.device, quantization: str | None) -> Form:
    if quantization is None:
        return Form.PLAIN
    return Form.FP8 if _is_gpu(device) else Form.ROUNDED


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _are_fp8_rows(stored: Sequence[StoredAs | None]) -> bool:
    return all(one is not None and one.is_fp8_rows for one in stored)


def _multiplies_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    return has_fp8(device) and dtype == torch.bfloat16


def _multiplies_groups(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16) and importlib.util.find_spec("triton") is not None
