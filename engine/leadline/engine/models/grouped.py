"""Weights of 4 or 8 bits with a scale for each group of columns, in one layout for all kinds of files.

    w[o, i] = (number(o, i) - zero[o, i // group]) * scale[o, i // group] * row_scale[o]

Two halves of a block of columns share the bytes of 4-bit weights, so that a tile of bytes becomes two tiles
of neighbouring columns and no lane has to move:

    columns   | HALF: low nibbles | HALF: high nibbles |  | ...        bytes   | HALF |  | HALF |  ...

Activations keep their 16 bits. On a GPU triton_grouped.py multiplies; the functions here are its reference.
"""

from __future__ import annotations

import enum

import torch
import torch.nn.functional as F

from leadline.engine.errors import UnsupportedModel
from leadline.engine.models.fp8 import FP8
from leadline.engine.models.quantized_config import Layout, StoredAs, cut_columns
from leadline.engine.models.quantized_files import E2M1, Codes, StoredLinear

__all__ = ["GroupedPart", "GroupedWeight", "Kind"]

_MOST_ROWS, _MOST_ROWS_FP8 = 1024, 64
"""Above this many rows it takes less time to unpack the weight once and multiply in 16 bits."""


class Kind(enum.IntEnum):
    """What a number is."""

    INT4 = 0
    FP4 = 1
    INT8 = 2
    FP8 = 3

    @property
    def middle(self) -> int:
        """The zero point where the file has none."""
        return {Kind.INT4: 8, Kind.INT8: 128}.get(self, 0)

    @staticmethod
    def of(stored: StoredAs) -> Kind:
        if stored.layout in (Layout.FP8, Layout.FP4):
            return Kind.FP8 if stored.layout is Layout.FP8 else Kind.FP4
        return Kind.INT4 if stored.bits == 4 else Kind.INT8


class GroupedWeight:
    """A weight [rows, columns]; zeros until the loader fills it.

    Attributes:
        values: uint8 [rows, columns / 2] for 4 bits; uint8 or e4m3 [rows, columns] for 8.
        scales: [rows, columns / group].
        zeros: uint8 or int16 [rows, columns / group], or None: `kind.middle` everywhere.
        row_scale: float32 [rows, 1], or None.
        order: int64 [columns], which input each column belongs to, or None: its own.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        stored: StoredAs,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.kind, self.rows, self.columns = Kind.of(stored), rows, columns
        self.half, self.group = cut_columns(columns, stored.group)
        self._most_rows = _MOST_ROWS_FP8 if self.kind is Kind.FP8 else _MOST_ROWS
        self.order: torch.Tensor | None = None
        self._groups: torch.Tensor | None = None  # of the columns of the rows that are filled

        def zeros(width: int, kind: torch.dtype) -> torch.Tensor:
            return torch.zeros((rows, width), dtype=kind, device=device)

        four = self.kind in (Kind.INT4, Kind.FP4)
        self.values = zeros(columns // 2 if four else columns, FP8 if self.kind is Kind.FP8 else torch.uint8)
        groups = columns // self.group
        scale_type = FP8 if stored.global_scale else torch.float32 if self.kind is Kind.FP8 else dtype
        self.scales = zeros(groups, scale_type)
        # GPTQ's zero points go up to 16, or to 256.
        zero_type = torch.uint8 if stored.bits == 4 else torch.int16
        self.zeros = zeros(groups, zero_type) if stored.zeros else None
        self.row_scale = zeros(1, torch.float32) if stored.global_scale else None

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, columns] → [T, rows]."""
        if self.order is not None:
            x = x.index_select(1, self.order)
        if not x.is_cuda:
            return F.linear(x, self.plain().to(x.dtype), bias)
        from leadline.engine.models.triton_grouped import product, unpack

        y = product(x, self) if len(x) <= self._most_rows else torch.mm(x, unpack(self, x.dtype).t())
        return y if bias is None else y.add_(bias)

    @property
    def nbytes(self) -> int:
        parts = (self.values, self.scales, self.zeros, self.row_scale)
        return sum(part.nbytes for part in parts if part is not None)

    def plain(self) -> torch.Tensor:
        """Return the weight in float32, its columns as they lie here."""
        if self.kind in (Kind.INT4, Kind.FP4):
            octets = self.values.view(self.rows, -1, self.half)
            codes = torch.stack((octets & 15, octets >> 4), dim=2).flatten(1)
        else:
            codes = self.values
        numbers = E2M1.to(codes.device)[codes.long()] if self.kind is Kind.FP4 else codes.float()
        zeros = self.kind.middle if self.zeros is None else self.zeros.float().unsqueeze(-1)
        grouped = numbers.view(self.rows, -1, self.group)
        numbers = ((grouped - zeros) * self.scales.float().unsqueeze(-1)).flatten(1)
        return numbers if self.row_scale is None else numbers * self.row_scale

    def put(self, codes: Codes, first: int, name: str) -> None:
        """Fill the rows from `first` on, and as many columns as `codes` has."""
        count, filled = codes.codes.shape
        groups = codes.groups
        if self._groups is not None and not torch.equal(self._groups, groups):
            raise UnsupportedModel(f"{name}: g_idx differs from that of a projection of the same input")
        self._groups = groups
        if bool((groups.diff() < 0).any()):
            order = torch.argsort(groups, stable=True)
            codes, groups = _taken(codes, order), groups[order]
            self.order = order.to(self.values.device)
        places = groups[:: self.group]
        if not torch.equal(places.repeat_interleave(self.group)[:filled], groups):
            raise UnsupportedModel(
                f"{name}: groups of columns do not lie in wholes of {self.group}; tensor_parallel 1 may help"
            )
        rows, device = slice(first, first + count), self.values.device
        numbers = codes.codes
        if filled < self.columns:
            padding = numbers.new_zeros((count, self.columns - filled))
            numbers = torch.cat((numbers, padding), dim=1)
        if self.kind in (Kind.INT4, Kind.FP4):
            halves = numbers.view(count, -1, 2, self.half)
            numbers = (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)
        self.values[rows].copy_(numbers)
        scales = codes.scales[:, places]
        if not torch.equal(scales.to(self.scales.dtype).float(), scales.float()):
            self.scales = self.scales.float()
        self.scales[rows, : len(places)] = scales.to(device, self.scales.dtype)
        if self.zeros is not None and codes.zeros is not None:
            self.zeros[rows, : len(places)] = codes.zeros[:, places].to(device, self.zeros.dtype)
        if self.row_scale is not None and codes.scale is not None:
            self.row_scale[rows] = codes.scale.to(device)

    def multiply_scales(self, by_row: torch.Tensor) -> None:
        """Multiply rows by powers of two, float32 [rows]."""
        if self.row_scale is not None:
            self.row_scale *= by_row[:, None]
            return
        wide = self.scales.float() * by_row[:, None]
        same = torch.equal(wide.to(self.scales.dtype).float(), wide)
        self.scales = wide.to(self.scales.dtype) if same else wide

    def fill_randomly(self, rows: slice, deviation: float, generator: torch.Generator) -> None:
        """Draw codes, and scales that give the weight this deviation."""
        values = self.values[rows]
        if self.kind is Kind.FP8:
            drawn = torch.empty(values.shape, dtype=torch.float32, device=values.device)
            values.copy_(drawn.normal_(0.0, 64.0, generator=generator).clamp_(-448, 448))
        else:
            values.random_(0, 256, generator=generator)
        spread = {Kind.INT4: 4.6, Kind.FP4: 2.9, Kind.INT8: 73.9, Kind.FP8: 64.0}[self.kind]
        if self.row_scale is None:
            self.scales[rows] = deviation / spread
        else:
            self.scales[rows] = 1.0
            self.row_scale[rows] = deviation / spread
        if self.zeros is not None:
            self.zeros[rows] = self.kind.middle


def _taken(codes: Codes, order: torch.Tensor) -> Codes:
    """Return the columns in another order."""
    return Codes(
        codes.codes[:, order], codes.scales, codes.zeros, codes.scale, codes.groups[order], codes.middle
    )


class GroupedPart:
    """Some rows of a grouped weight, and as many of its columns as are filled: where the loader puts a
    tensor."""

    def __init__(self, weight: GroupedWeight, rows: slice, columns: int) -> None:
        self.weight, self.rows, self.columns = weight, rows, columns

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.columns

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes * self.shape[0] // self.weight.rows

    def put_stored(self, linear: StoredLinear, rows: slice, columns: slice) -> None:
        self.weight.put(linear.codes(rows, columns), self.rows.start, linear.module)

    def fill_randomly(self, deviation: float, generator: torch.Generator) -> None:
        self.weight.fill_randomly(self.rows, deviation, generator)
