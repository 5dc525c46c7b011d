"""docs/invariants.md has every numbered case that anything refers to, and the tests it names exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "invariants.md").read_text()
PACKAGES = (
    "protocol",
    "engine",
    "gateway",
    "operator",
    "cli",
    "tests",
    "benchmarks",
    "docs",
    "examples",
    "charts",
)
CASE = re.compile(r"\b[EP]\d{1,2}\b")


def cases_in_use() -> dict[str, Path]:
    """Number of a case → a file that refers to it."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.suffix in {".py", ".md", ".yaml", ".tpl"}:
                found.update(dict.fromkeys(CASE.findall(path.read_text()), path))
    return found


def test_every_case_that_is_referred_to_is_on_the_page() -> None:
    rows = re.findall(r"^\| ([EP]\d+) \|", PAGE, re.MULTILINE)
    assert len(rows) == len(set(rows))
    missing = {case: path for case, path in cases_in_use().items() if case not in rows}
    assert not missing


def test_every_case_names_a_test_and_every_test_exists() -> None:
    rows = re.findall(r"^\| ([EP]\d+) \|", PAGE, re.MULTILINE)
    with_tests = re.findall(r"^- ([EP]\d+)\n  - `", PAGE, re.MULTILINE)
    assert with_tests == rows
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", PAGE)
    for file, test in named:
        assert re.search(rf"def {test}\(", (ROOT / "tests" / file).read_text()), f"{file}::{test}"
