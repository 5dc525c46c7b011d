"""Kubernetes quantities, such as 100Gi or 250m, as numbers.

Pure. Source: the documentation of resource.Quantity in k8s.io/apimachinery.
"""

from __future__ import annotations

import re
from decimal import Decimal

__all__ = ["quantity"]

_FORM = re.compile(r"([+-]?[0-9.]+)(?:[eE]([+-]?[0-9]+)|([numkMGTPE]|[KMGTPE]i)?)")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = "KMGTPE"


def quantity(text: str | int | float) -> Decimal:
    """Raises ValueError for something else."""
    match = _FORM.fullmatch(str(text))
    if match is None or match[1].count(".") > 1 or not any(map(str.isdigit, match[1])):
        raise ValueError(f"{text!r} is no quantity")
    number, exponent, suffix = Decimal(match[1]), match[2], match[3]
    if suffix and suffix.endswith("i"):
        return number * Decimal(1024 ** (_BINARY.index(suffix[0]) + 1))
    return number.scaleb(int(exponent) if exponent else _DECIMAL.get(suffix or "", 0))
