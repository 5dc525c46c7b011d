"""What documentation names is there: files and headings of links, options, variables, metrics, values of the
chart, fields of an InferenceService."""

from __future__ import annotations

import argparse
import importlib
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from leadline.operator.settings import OperatorSettings

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "*/README.md", "gateway/leadline/**/*.md")
    for path in ROOT.glob(pattern)
    if not {".venv", "node_modules"} & set(path.parts)
)
COMMANDS = ("serve", "up", "gateway", "operator", "chat", "warmup", "model-path")
FOLDERS = ("protocol", "engine", "gateway", "operator", "cli", "charts", "images", "tests", "benchmarks")


@cache
def sources() -> str:
    """All text that may define an option, a variable or a metric."""
    kinds = (".py", ".yaml", ".sh", ".tpl", "Dockerfile")
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.name.endswith(kinds))
    return "\n".join(path.read_text() for path in files if path != Path(__file__))


def pages() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(text: str) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pages()
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text()), target


@pages()
def test_variables_and_metrics_exist(page: Path) -> None:
    text = page.read_text()
    for name in set(re.findall(r"\bLEADLINE_[A-Z_]+\b", text)):
        setting = name.removeprefix("LEADLINE_OPERATOR_").lower()
        assert name in sources() or setting in OperatorSettings.__dataclass_fields__, name
    for room, name in set(re.findall(r"`leadline_(engine|gateway|operator)_(\w+)", text)):
        # Histograms and counters are defined without their suffix, and engines' metrics without a prefix.
        base = re.sub(r"_(total|bucket|count|sum)$", "", name)
        assert re.search(rf'["}}_]{base}(_total)?"', sources()), f"leadline_{room}_{name}"


@cache
def options(command: str) -> set[str]:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"leadline.cli.{command.replace('-', '_')}").add_arguments(parser)
    return {option for action in parser._actions for option in action.option_strings}


@pages()
def test_options_exist(page: Path) -> None:
    text = page.read_text().replace("\\\n", " ")
    for command, rest in re.findall(rf"\bleadline ({'|'.join(COMMANDS)})\b([^\n`#|]*)", text):
        assert set(re.findall(r"(?<= )--[a-z][a-z-]+", rest)) <= options(command), rest


def test_every_variable_is_on_the_page() -> None:
    page = (ROOT / "docs/environment.md").read_text()
    rooms = ("protocol", "engine", "gateway", "operator", "cli")
    text = "".join(path.read_text() for room in rooms for path in (ROOT / room).rglob("*.py"))
    names = set(re.findall(r"[\"']LEADLINE_[A-Z_]+", text))
    assert names
    assert [name for name in sorted(names) if f"`{name[1:]}" not in page] == []


def test_values_of_the_chart_exist() -> None:
    values = yaml.safe_load((ROOT / "charts/leadline/values.yaml").read_text())
    text = (ROOT / "docs/install.md").read_text()
    tops = "|".join(sorted(values))
    found = set(re.findall(rf"(?:--set |`)((?:{tops})\.[A-Za-z]+(?:\.[A-Za-z]+)*)(?==|`)", text))
    assert found
    for name in found:
        place = values
        for part in name.split("."):
            assert part in place, name
            place = place[part]
