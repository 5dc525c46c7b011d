"""Kubernetes quantities as numbers."""

from __future__ import annotations

from decimal import Decimal

import pytest

from leadline.operator.quantities import quantity


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1024Mi", "1Gi"),
        ("1Gi", "1073741824"),
        ("250m", "0.25"),
        ("1e3", "1k"),
        ("1E", "1000P"),
        ("1.5Gi", "1536Mi"),
    ],
)
def test_two_spellings_of_one_quantity_are_equal(one: str, other: str) -> None:
    assert quantity(one) == quantity(other)


def test_a_number_is_a_quantity() -> None:
    assert quantity(2) == Decimal(2)


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1GB", "1.2.3", ".", "one"])
def test_something_else_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="quantity"):
        quantity(text)
