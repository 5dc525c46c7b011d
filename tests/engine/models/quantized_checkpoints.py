"""Quantized copies of tiny checkpoints, and plain ones that hold the reference dequantization.

compressed-tensors packs and dequantizes its formats itself. GPTQ and AWQ are packed here by their published
layouts, one number at a time, and dequantized from the numbers before packing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Packer = Callable[[torch.Tensor, int], tuple[Tensors, torch.Tensor]]
"""A weight [out, in] and the number of its module → its tensors in the file, and what they stand for."""

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,
}
"""Of `build_reference`: groups of 32 over two ranks, and blocks of 128 that do not divide."""


def _scheme(kind: str, bits: int, **weights: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    return QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=bits, type=kind, **weights)
    )


def _compressed(scheme: Any, written: str) -> Packer:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    compressor = BaseCompressor.get_value_from_registry(written)

    def pack(weight: torch.Tensor, number: int) -> tuple[Tensors, torch.Tensor]:
        args = scheme.weights
        strategy = str(args.strategy)
        groups = _cut(weight, strategy, args)
        low, high = groups.amin(-1), groups.amax(-1)
        state: Tensors = {"weight": weight}
        if strategy == "tensor_group":
            state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
        scale, zero = calculate_qparams(low, high, args, global_scale=state.get("weight_global_scale"))
        if strategy == "channel":
            scale, zero = scale.reshape(-1, 1), zero.reshape(-1, 1)
        state["weight_scale"] = scale
        if not args.symmetric:
            state["weight_zero_point"] = zero
        packed = compressor.compress(state, scheme)
        if args.symmetric:
            packed.pop("weight_zero_point", None)
        if args.num_bits == 4 and str(args.type) == "float":
            return dict(packed), _fp4_in_float32(packed, scale, args)
        return dict(packed), compressor.decompress(dict(packed), scheme)["weight"]

    return pack


def _fp4_in_float32(packed: Tensors, scale: torch.Tensor, args: Any) -> torch.Tensor:
    """As the compressor decompresses it, which would round to bfloat16."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    codes = packed["weight_packed"]
    numbers = unpack_fp4_from_uint8(codes, codes.shape[0], codes.shape[1] * 2, torch.float32)
    return dequantize(numbers, scale.float(), args=args, global_scale=packed.get("weight_global_scale"))


def _cut(weight: torch.Tensor, strategy: str, args: Any) -> torch.Tensor:
    """The numbers that share a scale, in the last dimension."""
    rows, columns = weight.shape
    if strategy == "tensor":
        return weight.reshape(1, -1)
    if strategy == "channel":
        return weight
    if strategy == "block":
        down, across = -(-rows // 128), -(-columns // 128)
        wide = torch.zeros(down * 128, across * 128)
        wide[:rows, :columns] = weight
        return wide.view(down, 128, across, 128).permute(0, 2, 1, 3).flatten(2)
    return weight.view(rows, -1, args.group_size)


def fp8(strategy: str) -> Packer:
    args = {"block_structure": [128, 128]} if strategy == "block" else {}
    return _compressed(_scheme("float", 8, strategy=strategy, **args), "float-quantized")


def whole_numbers(bits: int, group: int, symmetric: bool) -> Packer:
    args = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    return _compressed(_scheme("int", bits, symmetric=symmetric, **args), "pack-quantized")


def nvfp4() -> Packer:
    args = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
    return _compressed(_scheme("float", 4, **args), "nvfp4-pack-quantized")


def mxfp4() -> Packer:
    args = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    return _compressed(_scheme("float", 4, **args), "mxfp4-pack-quantized")


def _numbers(weight: np.ndarray, bits: int, group: np.ndarray, symmetric: bool) -> Any:
    """Round by the least and the largest of each group: numbers [out, in], scales and zeros [out, groups]."""
    most = 2**bits - 1
    count = group.max() + 1
    low = np.stack([weight[:, group == g].min(1) for g in range(count)], 1)
    high = np.stack([weight[:, group == g].max(1) for g in range(count)], 1)
    if symmetric:
        high = np.maximum(np.abs(low), np.abs(high))
        low = -high
    scales = ((high - low) / most).astype(np.float16).astype(np.float32)
    zeros = np.full(scales.shape, 2 ** (bits - 1)) if symmetric else np.clip(np.rint(-low / scales), 1, most)
    numbers = np.clip(np.rint(weight / scales[:, group] + zeros[:, group]), 0, most)
    plain = (numbers - zeros[:, group]) * scales[:, group]
    return numbers.astype(np.int64), scales, zeros.astype(np.int64), plain


def _words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack along the last dimension: number order[i] of a word has its bits i * bits and up."""
    each = 32 // bits
    words = np.zeros((numbers.shape[0], numbers.shape[1] // each), np.int64)
    for place in range(each):
        from_here = place if order is None else order[place]
        words |= numbers[:, from_here::each] << (place * bits)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def gptq(bits: int, size: int, symmetric: bool, *, ordered: bool = False, version: int = 1) -> Packer:
    def pack(weight: torch.Tensor, number: int) -> tuple[Tensors, torch.Tensor]:
        width = weight.shape[1]
        group = np.arange(width) // (width if size == -1 else size)
        if ordered:
            # Projections of one input have one order: q, k, v of a layer; gate and up.
            group = np.random.default_rng(number).permutation(group)
        numbers, scales, zeros, plain = _numbers(weight.numpy(), bits, group, symmetric)
        return {
            "qweight": _words(numbers, bits).t().contiguous(),
            "qzeros": _words(zeros.T - (version == 1), bits),
            "scales": torch.from_numpy(scales.T.copy()).half(),
            "g_idx": torch.from_numpy(group.astype(np.int32)),
        }, torch.from_numpy(plain).float()

    return pack


def awq(size: int) -> Packer:
    def pack(weight: torch.Tensor, number: int) -> tuple[Tensors, torch.Tensor]:
        group = np.arange(weight.shape[1]) // size
        numbers, scales, zeros, plain = _numbers(weight.numpy(), 4, group, False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            "qweight": _words(numbers.T, 4, order),
            "qzeros": _words(zeros.T, 4, order),
            "scales": torch.from_numpy(scales.T.copy()).half(),
        }, torch.from_numpy(plain).float()

    return pack


def quantize(
    folder: Path,
    target: Path,
    packer: Packer,
    fields: dict[str, Any],
    *,
    skipped: tuple[str, ...] = ("lm_head", "embed_tokens", "norm", "mlp.gate."),
    renamed: dict[str, str] | None = None,
) -> tuple[Path, Path]:
    """Write a quantized copy of a checkpoint and one of what it stands for. Returns both folders."""
    quantized, plain = target / "quantized", target / "plain"
    inputs: dict[str, int] = {}
    for copy in (quantized, plain):
        shutil.copytree(folder, copy)
    tensors = load_file(folder / "model.safetensors")
    packed: Tensors = {}
    for name, tensor in list(tensors.items()):
        module, _, kind = name.rpartition(".")
        if kind != "weight" or tensor.dim() != 2 or any(one in name for one in skipped):
            packed[name] = tensor
            continue
        stem = module.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
        number = inputs.setdefault(stem, len(inputs))
        made, stands_for = packer(tensor.float(), number)
        for part, value in made.items():
            packed[f"{module}.{(renamed or {}).get(part, part)}"] = value.contiguous()
        tensors[name] = stands_for.contiguous()
    save_file(packed, quantized / "model.safetensors")
    save_file(tensors, plain / "model.safetensors")
    file = quantized / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": fields}))
    return quantized, plain


def compressed_fields(written: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": more.pop("activations", None)}
    return {
        "quant_method": "compressed-tensors",
        "format": written,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }
