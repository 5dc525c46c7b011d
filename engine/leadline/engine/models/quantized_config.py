"""`quantization_config` of config.json: how the checkpoint stores the weight of each linear.

Reads the forms of compressed-tensors, FP8 (DeepSeek, Qwen3, AutoFP8), GPTQ, AWQ and ModelOpt. A form that is
not supported raises UnsupportedModel with the name of the field. Imports no torch.
"""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import regex

from leadline.engine.errors import UnsupportedModel

__all__ = ["Layout", "QuantizedConfig", "StoredAs", "can_group", "cut_columns", "read_quantization"]

_FIELDS = ("quantization_config", "compression_config")
_GROUP_SIZES = (16, 32, 64, 128)
_MATCH_SECONDS = 1.0
"""Of CPU time. A pattern that is meant well takes microseconds for a name; others never end."""


class Layout(enum.Enum):
    """Tensors of a linear in the file."""

    FP8 = "fp8"
    """weight e4m3 [out, in]; scales of tensor, rows or blocks"""
    PACKED = "packed"
    """compressed-tensors: weight_packed int32 [out, in * bits / 32], weight_scale [out, groups]"""
    GPTQ = "gptq"
    """qweight int32 [in * bits / 32, out], scales [groups, out], qzeros [groups, out * bits / 32], g_idx"""
    AWQ = "awq"
    """qweight int32 [in, out / 8], scales [groups, out], qzeros [groups, out / 8]"""
    FP4 = "fp4"
    """two e2m1 a byte, uint8 [out, in / 2]; scales of groups, e4m3 (NVFP4) or powers of two (MXFP4)"""


@dataclass(slots=True, frozen=True)
class StoredAs:
    """How one linear is stored.

    Attributes:
        layout: its tensors.
        bits: of a weight.
        group: columns that share a scale; 0: all of the row.
        block_rows: rows that share a scale; 0: all of them. 1 but for FP8.
        weight, scale: names of these tensors behind the module's.
        global_scale: name of the scale of the whole tensor (NVFP4), "" if there is none.
        divides: the global scale is a divisor.
        zeros: there are zero points.
        zero_offset: what is added to a zero point as stored.
        ordered: g_idx says which group a column belongs to.
    """

    layout: Layout
    bits: int
    group: int
    block_rows: int = 1
    weight: str = "weight"
    scale: str = "weight_scale"
    global_scale: str = ""
    divides: bool = False
    zeros: bool = False
    zero_offset: int = 0
    ordered: bool = False

    @property
    def is_fp8_rows(self) -> bool:
        """FP8 with one scale a row, or one for all rows."""
        return self.layout is Layout.FP8 and not self.group

    def row_bytes(self, columns: int, dtype_bytes: int) -> int:
        """Return the bytes that a GPU keeps of a row: numbers, scales and zero points."""
        if self.is_fp8_rows:
            return columns + 4
        if not can_group(columns):
            return columns * dtype_bytes
        scale = 4 if self.layout is Layout.FP8 else 1 if self.global_scale else dtype_bytes
        groups = columns // cut_columns(columns, self.group)[1]
        zero = self.bits // 4 if self.zeros else 0
        return columns * self.bits // 8 + groups * (scale + zero) + (4 if self.global_scale else 0)


@dataclass(slots=True, frozen=True)
class QuantizedConfig:
    """Which linears of a checkpoint are stored how.

    Attributes:
        method: as users know it, for messages.
        groups: targets (class names, module names, `re:` patterns) and how these are stored.
        ignored: names of modules that are stored plainly.
    """

    method: str
    groups: tuple[tuple[tuple[str, ...], StoredAs], ...]
    ignored: tuple[str, ...]

    def of(self, module: str) -> StoredAs | None:
        """Return how `module` (model.layers.0.self_attn.q_proj) is stored; None: in plain 16 or 32 bits.

        Raises UnsupportedModel for a pattern that takes too long.
        """
        if any(ignores(one, module) for one in self.ignored for ignores in _IGNORES[self.method]):
            return None
        for match in (_matches_name, _matches_pattern, _matches_class):
            for targets, stored in self.groups:
                if any(match(target, module) for target in targets):
                    return stored
        return None

    @property
    def kinds(self) -> tuple[StoredAs, ...]:
        """Every way in which some linear is stored."""
        return tuple(stored for _, stored in self.groups)


def can_group(columns: int) -> bool:
    """Return whether rows of so many columns can be kept in groups (grouped.py)."""
    return columns % 32 == 0


def cut_columns(columns: int, group: int) -> tuple[int, int]:
    """Return how rows are kept in groups: half the columns of a block, and the columns that share a scale:
    the stored group, or less where blocks of it do not divide a row."""
    halves = (group, 64, 32, 16) if group in (64, 128) else (128, 64, 32, 16)
    half = next(half for half in halves if columns % (2 * half) == 0)
    return half, min(group or half, half)


def read_quantization(raw: Mapping[str, Any]) -> QuantizedConfig | None:
    """Return what config.json says about quantized weights, or None. Raises UnsupportedModel."""
    name = next((name for name in _FIELDS if raw.get(name)), None)
    if name is None:
        return None
    fields = raw[name]
    if not isinstance(fields, dict):
        raise UnsupportedModel(f"config.json: {name} must be an object, not {fields!r}")
    method = fields.get("quant_method", "compressed-tensors" if "config_groups" in fields else None)
    read = _METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        raise UnsupportedModel(
            f"config.json: {name}.quant_method {method!r} is not supported; {', '.join(_METHODS)} are"
        )
    return read(_Fields(name, fields))


class _Fields:
    """An object of config.json whose fields are read by name, for messages that name them."""

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def first(self, *names: str) -> str:
        """Return the first of these spellings of one field that is set, or the last."""
        return next((name for name in names if self.values.get(name) is not None), names[-1])

    def refuse(self, name: str, supported: str) -> UnsupportedModel:
        value = self.values.get(name)
        return UnsupportedModel(f"config.json: {self.path}.{name} {value!r} is not supported; {supported}")

    def one_of(self, name: str, default: Any, *supported: Any) -> Any:
        """Return the field. Raises UnsupportedModel if it is none of `supported`."""
        value = self.get(name, default)
        if isinstance(value, list | dict) or not any(
            value == one and type(value) is type(one) for one in supported
        ):
            raise self.refuse(name, f"supported: {', '.join(str(one) for one in supported)}")
        return value

    def empty(self, *names: str) -> None:
        """Raise UnsupportedModel for one of these fields that is set."""
        for name in names:
            if self.values.get(name):
                raise self.refuse(name, "it must be left out")

    def inner(self, name: str) -> _Fields | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(name, "an object is expected")
        return _Fields(f"{self.path}.{name}", value)

    def names(self, *fields: str) -> tuple[str, ...]:
        """Return the module names that these lists have."""
        found: list[str] = []
        for field in fields:
            value = self.get(field, [])
            if not isinstance(value, list) or not all(_is_target(one) for one in value):
                raise self.refuse(field, "a list of module names and patterns is expected")
            found += value
        return tuple(found)


def _is_target(value: object) -> bool:
    """A name, or `re:` and a pattern that compiles."""
    if not isinstance(value, str):
        return False
    try:
        regex.compile(value.removeprefix("re:") if value.startswith("re:") else "")
    except (regex.error, RecursionError):
        return False
    return True


# compressed-tensors


def _compressed_tensors(fields: _Fields) -> QuantizedConfig:
    fields.empty("transform_config", "moe_sparsity_config")
    sparsity = fields.inner("sparsity_config")
    if sparsity is not None and sparsity.values:
        sparsity.one_of("format", "dense", "dense")
    fields.one_of("quantization_status", "compressed", "compressed", "frozen")
    groups = fields.inner("config_groups")
    if groups is None or not groups.values:
        raise fields.refuse("config_groups", "one group or more is expected")
    found = []
    for name in groups.values:
        group = groups.inner(name)
        if group is None:
            raise groups.refuse(name, "an object is expected")
        found.append((group.names("targets"), _compressed_group(group, fields)))
    return QuantizedConfig("compressed-tensors", tuple(found), fields.names("ignore"))


def _compressed_group(group: _Fields, fields: _Fields) -> StoredAs:
    weights = group.inner("weights")
    if weights is None:
        raise group.refuse("weights", "an object is expected")
    group.empty("output_activations")
    if weights.get("actorder") in ("group", "dynamic") and weights.get("type", "int") != "int":
        raise weights.refuse("actorder", "it goes with whole numbers only")
    kind, bits = weights.one_of("type", "int", "int", "float"), weights.one_of("num_bits", 8, 4, 8)
    written = group.get("format") or fields.get("format")
    if kind == "float" and bits == 8:
        return _compressed_fp8(weights, written, group, fields)
    if kind == "float":
        size = weights.one_of("group_size", 16, 16, 32)
        if written in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
            expected = 16 if written == "nvfp4-pack-quantized" else 32
            weights.one_of("group_size", expected, expected)
            whole = "weight_global_scale" if size == 16 else ""
            return StoredAs(Layout.FP4, 4, size, weight="weight_packed", global_scale=whole, divides=True)
    elif written == "pack-quantized":
        if group.values.get("input_activations") is not None:
            raise group.refuse("input_activations", "weights of whole numbers go with plain activations")
        weights.one_of("dynamic", False, False)
        size = 0 if weights.get("strategy") == "channel" else _group_size(weights, "group_size")
        return StoredAs(
            Layout.PACKED,
            bits,
            size,
            weight="weight_packed",
            zeros=not weights.one_of("symmetric", True, True, False),
            ordered=size > 0 and weights.get("actorder") in ("group", "dynamic"),
        )
    where = group if group.get("format") else fields
    raise where.refuse("format", f"not for weights of type {kind} with {bits} bits")


def _compressed_fp8(weights: _Fields, written: object, group: _Fields, fields: _Fields) -> StoredAs:
    if written not in ("float-quantized", "naive-quantized"):
        where = group if group.get("format") else fields
        raise where.refuse("format", "float-quantized is, for weights of type float with 8 bits")
    weights.one_of("symmetric", True, True)
    strategy = weights.one_of("strategy", "tensor", "tensor", "channel", "block")
    if strategy != "block":
        return StoredAs(Layout.FP8, 8, 0, block_rows=int(strategy == "channel"))
    rows, columns = _block(weights, "block_structure")
    return StoredAs(Layout.FP8, 8, columns, block_rows=rows)


# the others


def _fp8(fields: _Fields) -> QuantizedConfig:
    fields.one_of("fmt", "e4m3", "e4m3", "float8_e4m3fn")
    fields.one_of("activation_scheme", "dynamic", "dynamic", "static")
    if fields.get("scale_fmt") not in (None, "float"):
        raise fields.refuse("scale_fmt", "scales in float32 are")
    if fields.values.get("weight_block_size") is None:
        stored = StoredAs(Layout.FP8, 8, 0, block_rows=0)
    else:
        rows, columns = _block(fields, "weight_block_size")
        stored = StoredAs(Layout.FP8, 8, columns, block_rows=rows, scale="weight_scale_inv")
    return QuantizedConfig("fp8", _of_all(stored), fields.names("modules_to_not_convert", "ignored_layers"))


def _gptq(fields: _Fields) -> QuantizedConfig:
    fields.empty("dynamic", "is_marlin_format", "rotation", "adapter")
    written = fields.one_of(fields.first("checkpoint_format", "format"), "gptq", "gptq", "gptq_v2")
    fields.one_of("pack_dtype", "int32", "int32")
    size = _group_size(fields, "group_size")
    stored = StoredAs(
        Layout.GPTQ,
        fields.one_of("bits", 4, 4, 8),
        size,
        weight="qweight",
        scale="scales",
        zeros=not fields.one_of("sym", True, True, False),
        zero_offset=int(written == "gptq"),
        ordered=fields.one_of("desc_act", False, True, False) and size > 0,
    )
    return QuantizedConfig("gptq", _of_all(stored), fields.names("modules_to_not_convert"))


def _awq(fields: _Fields) -> QuantizedConfig:
    fields.one_of(fields.first("version", "checkpoint_format", "format"), "gemm", "gemm", "GEMM")
    fields.one_of("zero_point", True, True)
    stored = StoredAs(
        Layout.AWQ,
        fields.one_of("bits", 4, 4),
        _group_size(fields, "group_size"),
        weight="qweight",
        scale="scales",
        zeros=True,
    )
    return QuantizedConfig("awq", _of_all(stored), fields.names("modules_to_not_convert"))


def _modelopt(fields: _Fields) -> QuantizedConfig:
    algorithm = fields.one_of("quant_algo", "FP8", "FP8", "NVFP4")
    if algorithm == "FP8":
        stored = StoredAs(Layout.FP8, 8, 0, block_rows=0)
    else:
        stored = StoredAs(Layout.FP4, 4, 16, global_scale="weight_scale_2")
    return QuantizedConfig("modelopt", _of_all(stored), fields.names("exclude_modules", "ignore"))


_METHODS: dict[str, Callable[[_Fields], QuantizedConfig]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "modelopt": _modelopt,
}


def _group_size(fields: _Fields, name: str) -> int:
    value = fields.one_of(name, -1, -1, *_GROUP_SIZES)
    return 0 if value == -1 else int(value)


def _block(fields: _Fields, name: str) -> tuple[int, int]:
    if fields.get(name) != [128, 128]:
        raise fields.refuse(name, "[128, 128] is")
    return 128, 128


def _of_all(stored: StoredAs) -> tuple[tuple[tuple[str, ...], StoredAs], ...]:
    return ((("Linear",), stored),)


def _has_parts(name: str, module: str) -> bool:
    """`mlp.gate` is part of `model.layers.0.mlp.gate` and not of `model.layers.0.mlp.gate_proj`."""
    return f".{name}." in f".{module}."


def _matches_name(target: str, module: str) -> bool:
    return target == module


def _matches_pattern(target: str, module: str) -> bool:
    if not target.startswith("re:"):
        return False
    try:
        return regex.match(target[3:], module, timeout=_MATCH_SECONDS) is not None
    except TimeoutError as error:
        raise UnsupportedModel(
            f"config.json: the pattern {target!r} of quantization_config takes too long for {module}"
        ) from error


def _matches_class(target: str, module: str) -> bool:
    return target == "Linear"


_IGNORES: dict[str, tuple[Callable[[str, str], bool], ...]] = {
    "compressed-tensors": (_matches_name, _matches_pattern),
    "fp8": (_has_parts,),
    "gptq": (_has_parts,),
    "awq": (_has_parts,),
    "modelopt": (_has_parts, lambda name, module: fnmatch.fnmatchcase(module, name)),
}
"""How a method's list of modules that stay plain is read."""
