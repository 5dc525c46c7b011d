"""Read the quantized weight of one linear out of safetensors files, or any part of it.

Rows are outputs and columns inputs, as in a plain weight [out, in], whatever the file's order is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from leadline.engine.errors import UnsupportedModel
from leadline.engine.models.fp8 import FP8
from leadline.engine.models.quantized_config import Layout, StoredAs

__all__ = ["E2M1", "Codes", "StoredLinear"]

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""The numbers that the sixteen codes of FP4 stand for."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where an int32 of AWQ has its outputs 0 to 7: in units of 4 bits, the lowest first."""
_FLOATS = ("F32", "F16", "BF16")


@dataclass(slots=True, frozen=True)
class Codes:
    """A part of a weight: w[r, c] = (number(codes[r, c]) - zeros[r, g]) * scales[r, g] * scale[r], g the
    group of column c.

    Attributes:
        codes: [R, C]; uint8 (whole numbers, or FP4) or e4m3.
        scales: [R, G], in the type of the file; float32 if made.
        zeros: [R, G] uint8 to int16, or None: `middle` for whole numbers, 0 otherwise.
        scale: float32 [R, 1], or None.
        groups: int64 [C], counted from the first group of scales.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    scale: torch.Tensor | None
    groups: torch.Tensor
    middle: int

    def plain(self) -> torch.Tensor:
        """Return the weight in float32."""
        if self.codes.dtype == FP8:
            numbers = self.codes.float()
        elif self.middle:
            zeros = self.middle if self.zeros is None else self.zeros.float()[:, self.groups]
            numbers = self.codes.float() - zeros
        else:
            numbers = E2M1[self.codes.long()]
        numbers *= self.scales.float()[:, self.groups]
        return numbers if self.scale is None else numbers * self.scale


class StoredLinear:
    """The tensors of a linear.

    `tensor` returns the safetensors slice of a name, or None if no file has it. Raises UnsupportedModel for
    tensors that are missing, of another shape or of another type than `stored` implies.
    """

    def __init__(
        self, module: str, stored: StoredAs, shape: tuple[int, int], tensor: Callable[[str], Any]
    ) -> None:
        self.module, self.stored, self.shape, self._tensor = module, stored, shape, tensor

    def plain(self, rows: slice, columns: slice) -> torch.Tensor:
        """Return the part in float32."""
        return self.codes(rows, columns).plain()

    def codes(self, rows: slice, columns: slice) -> Codes:
        """Return the part as it is stored."""
        return _READERS[self.stored.layout](self, rows, columns)

    def get(self, name: str, types: tuple[str, ...], *shapes: tuple[int, ...]) -> Any:
        """Return the slice of a tensor of this module, checked."""
        source = self._tensor(f"{self.module}.{name}")
        if source is None:
            raise UnsupportedModel(f"tensor {self.module}.{name} is missing")
        shape, dtype = tuple(source.get_shape()), source.get_dtype()
        if dtype not in types:
            raise UnsupportedModel(
                f"tensor {self.module}.{name} has dtype {dtype}; quantization_config implies "
                f"{' or '.join(types)}"
            )
        if shape not in shapes:
            expected = " or ".join(str(list(one)) for one in shapes)
            raise UnsupportedModel(
                f"tensor {self.module}.{name} has shape {list(shape)}; config.json implies {expected}"
            )
        return source

    def groups(self, columns: slice) -> tuple[slice, torch.Tensor]:
        """Return the groups that these columns belong to, and the group of each, counted from the first."""
        size, width = self.stored.group or self.shape[1], self.shape[1]
        if self.stored.ordered:
            name = "g_idx" if self.stored.layout is Layout.GPTQ else "weight_g_idx"
            index = self.get(name, ("I32", "I64"), (width,))[columns].long()
            if bool(((index < 0) | (index >= self.group_count)).any()):
                raise UnsupportedModel(
                    f"tensor {self.module}.{name} names a group beyond the {self.group_count} that there are"
                )
            return slice(0, -(-width // size)), index
        first = columns.start // size
        index = torch.arange(columns.start, columns.stop) // size - first
        return slice(first, -(-columns.stop // size)), index

    @property
    def group_count(self) -> int:
        return -(-self.shape[1] // (self.stored.group or self.shape[1]))


def _fp8(linear: StoredLinear, rows: slice, columns: slice) -> Codes:
    stored, (height, width) = linear.stored, linear.shape
    weight = linear.get(stored.weight, ("F8_E4M3",), (height, width))[rows, columns]
    groups, index = linear.groups(columns)
    if stored.block_rows == 0:
        scale = linear.get(stored.scale, _FLOATS, (), (1,), (1, 1))[...].reshape(1, 1)
        scales = scale.expand(weight.shape[0], 1)
    elif stored.block_rows == 1:
        scales = linear.get(stored.scale, _FLOATS, (height, 1), (height,))[rows].reshape(-1, 1)
    else:
        high = -(-height // stored.block_rows)
        blocks = linear.get(stored.scale, _FLOATS, (high, linear.group_count))[:, groups]
        scales = blocks[torch.arange(rows.start, rows.stop) // stored.block_rows]
    return Codes(weight, scales.float(), None, None, index, 0)


def _packed(linear: StoredLinear, rows: slice, columns: slice) -> Codes:
    stored, (height, width) = linear.stored, linear.shape
    each = 32 // stored.bits
    words = linear.get(stored.weight, ("I32",), (height, -(-width // each)))
    codes = _cut(words[rows, _words(columns, each)], stored.bits, 1, columns)
    groups, index = linear.groups(columns)
    scales = linear.get(stored.scale, _FLOATS, (height, linear.group_count))[rows, groups]
    zeros = None
    if stored.zeros:
        packed = linear.get("weight_zero_point", ("I32",), (-(-height // each), linear.group_count))
        zeros = _cut(packed[_words(rows, each), groups], stored.bits, 0, rows)
    return Codes(codes, scales, zeros, None, index, 1 << (stored.bits - 1))


def _gptq(linear: StoredLinear, rows: slice, columns: slice) -> Codes:
    stored, (height, width) = linear.stored, linear.shape
    each = 32 // stored.bits
    words = linear.get(stored.weight, ("I32",), (-(-width // each), height))
    codes = _cut(words[_words(columns, each), rows], stored.bits, 0, columns).t().contiguous()
    groups, index = linear.groups(columns)
    scales = linear.get(stored.scale, _FLOATS, (linear.group_count, height))[groups, rows].t().contiguous()
    zeros = None
    if stored.zeros:
        packed = linear.get("qzeros", ("I32",), (linear.group_count, -(-height // each)))
        zeros = _cut(packed[groups, _words(rows, each)], stored.bits, 1, rows).t().to(torch.int16)
        zeros = (zeros + stored.zero_offset).contiguous()
    return Codes(codes, scales, zeros, None, index, 1 << (stored.bits - 1))


def _awq(linear: StoredLinear, rows: slice, columns: slice) -> Codes:
    stored, (height, width) = linear.stored, linear.shape
    if height % 8:
        raise UnsupportedModel(f"{linear.module} has {height} rows; AWQ packs 8 of them in a number")
    words = linear.get(stored.weight, ("I32",), (width, height // 8))
    codes = _cut(words[columns, _words(rows, 8)], 4, 1, rows, _AWQ_ORDER).t().contiguous()
    groups, index = linear.groups(columns)
    scales = linear.get(stored.scale, _FLOATS, (linear.group_count, height))[groups, rows].t().contiguous()
    packed = linear.get("qzeros", ("I32",), (linear.group_count, height // 8))
    zeros = _cut(packed[groups, _words(rows, 8)], 4, 1, rows, _AWQ_ORDER).t().contiguous()
    return Codes(codes, scales, zeros, None, index, 8)


def _fp4(linear: StoredLinear, rows: slice, columns: slice) -> Codes:
    stored, (height, width) = linear.stored, linear.shape
    pairs = linear.get(stored.weight, ("U8",), (height, width // 2))
    codes = _cut(pairs[rows, _words(columns, 2)].contiguous(), 4, 1, columns)
    groups, index = linear.groups(columns)
    shape = (height, linear.group_count)
    whole = None
    if stored.global_scale:
        scales = linear.get(stored.scale, ("F8_E4M3",), shape)[rows, groups]
        whole = linear.get(stored.global_scale, _FLOATS, (), (1,))[...].float().reshape(1, 1)
        whole = (1.0 / whole if stored.divides else whole).expand(codes.shape[0], 1)
    else:
        exponents = linear.get(stored.scale, ("U8", "F8_E8M0"), shape)[rows, groups]
        scales = torch.exp2(exponents.view(torch.uint8).float() - 127.0)
    return Codes(codes, scales, None, whole, index, 0)


_READERS: dict[Layout, Callable[[StoredLinear, slice, slice], Codes]] = {
    Layout.FP8: _fp8,
    Layout.PACKED: _packed,
    Layout.GPTQ: _gptq,
    Layout.AWQ: _awq,
    Layout.FP4: _fp4,
}


def _words(part: slice, each: int) -> slice:
    """Return the packed numbers that hold `part`."""
    return slice(part.start // each, -(-part.stop // each))


def _cut(
    words: torch.Tensor, bits: int, dim: int, part: slice, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Unpack words [a, b] along `dim` into uint8 and cut out `part`, in places of the whole tensor.

    `order`: where a word has its numbers; None: the first in the lowest bits.
    """
    each = words.element_size() * 8 // bits
    if dim == 0:
        return _cut(words.t().contiguous(), bits, 1, part, order).t().contiguous()
    # A column counts as contiguous whatever its strides are, and view wants them to be 1.
    octets = words.reshape(-1).view(torch.uint8).view(len(words), -1)
    if bits == 4:
        octets = torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)
    if order is not None:
        octets = octets.view(len(words), -1, each)[:, :, list(order)].flatten(1)
    first = part.start % each
    return octets[:, first : first + part.stop - part.start].contiguous()
