"""Where the loader puts the weights of a linear that is not kept in plain floats."""

from __future__ import annotations

from typing import Protocol

import torch

from leadline.engine.models.fp8 import quantize_rows, round_rows
from leadline.engine.models.quantized_files import StoredLinear

__all__ = ["FP8Rows", "RoundedRows", "Target"]


class Target(Protocol):
    """Some rows and columns of a weight."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def nbytes(self) -> int: ...

    def put_stored(self, linear: StoredLinear, rows: slice, columns: slice) -> None:
        """Fill all of it from this part of a quantized linear in a file."""

    def fill_randomly(self, deviation: float, generator: torch.Generator) -> None:
        """Draw normal weights on its device."""


class FP8Rows:
    """values e4m3 [rows, columns] and scales float32 [rows, 1]."""

    def __init__(self, values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
        self.values, self.scales, self.dtype = values, scales, dtype

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def put(self, plain: torch.Tensor) -> None:
        """Round a weight of any float type."""
        values, scales = quantize_rows(plain.to(self.values.device, self.dtype))
        self.values.copy_(values)
        self.scales.copy_(scales)

    def put_stored(self, linear: StoredLinear, rows: slice, columns: slice) -> None:
        codes = linear.codes(rows, columns)
        self.values.copy_(codes.codes)
        self.scales.copy_(codes.scales)

    def fill_randomly(self, deviation: float, generator: torch.Generator) -> None:
        drawn = torch.empty(self.shape, dtype=self.dtype, device=self.values.device)
        self.put(drawn.normal_(0.0, deviation, generator=generator))


class RoundedRows:
    """values [rows, columns] in the model's type, rounded as FP8 rounds: the reference on a CPU."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def put(self, plain: torch.Tensor) -> None:
        self.values.copy_(round_rows(plain.to(self.values.device, self.values.dtype)))

    def put_stored(self, linear: StoredLinear, rows: slice, columns: slice) -> None:
        self.put(linear.plain(rows, columns))

    def fill_randomly(self, deviation: float, generator: torch.Generator) -> None:
        drawn = torch.empty_like(self.values, memory_format=torch.contiguous_format)
        self.put(drawn.normal_(0.0, deviation, generator=generator))
