"""Fields of config.json, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leadline.engine.errors import UnsupportedModel

__all__ = ["LARGEST", "MOST_LAYERS", "flag", "positive", "positive_number"]

LARGEST = (1 << 31) - 1
"""No size of a model is beyond it."""
MOST_LAYERS = 10_000


def positive(fields: Mapping[str, Any], name: str, default: int | None = None, *, most: int = LARGEST) -> int:
    """Raises UnsupportedModel naming the field that is no positive integer, or no size that a model has."""
    value = fields.get(name, default)
    if value is None:
        raise UnsupportedModel(f"config.json lacks {name}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json: {name} must be a positive integer, not {value!r}")
    if value > most:
        raise UnsupportedModel(f"config.json: {name} {value} is beyond any model's")
    return value


def positive_number(value: object, name: str) -> float:
    """Return `value`. Raises UnsupportedModel naming the field unless it is a number from 1e-30 to 1e30."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-30 <= value <= 1e30:
        raise UnsupportedModel(f"config.json: {name} must be a positive number, not {value!r}")
    return float(value)


def flag(fields: Mapping[str, Any], name: str) -> bool:
    """Absent is false. Raises UnsupportedModel naming the field that is neither true nor false."""
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise UnsupportedModel(f"config.json: {name} must be true or false, not {value!r}")
    return value
