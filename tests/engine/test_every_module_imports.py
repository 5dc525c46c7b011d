"""Every module of the distribution can be imported, but for those that need a GPU's compiler."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOTS = [Path(__file__).parents[2] / name for name in ("protocol", "engine", "gateway", "operator", "cli")]
MODULES = sorted(
    ".".join(file.relative_to(root).with_suffix("").parts)
    for root in ROOTS
    for file in root.glob("leadline/**/*.py")
    if file.stem not in ("__init__", "__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_can_be_imported(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
