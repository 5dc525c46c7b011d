"""docs/troubleshooting.md has every reason of a condition and every code of an error, with its status."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from leadline.gateway.tokens.mode import Reason as TextReason
from leadline.protocol.isvc import Reason

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SOURCES = ["protocol/leadline/protocol", "engine/leadline/engine", "gateway/leadline/gateway"]


def rows(text: str, first: str) -> list[list[str]]:
    """Cells of the table whose first column is called `first`."""
    lines = text.split(f"\n| {first} |", 1)[1].splitlines()[2:]
    table = []
    for line in lines:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return table


def trees() -> Iterator[ast.Module]:
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if "code=" in text or "status = " in text or "_refuse(" in text:
                yield ast.parse(text)


def statuses(modules: list[ast.Module]) -> dict[str, int]:
    """Class of an error → the status that it or its nearest base gives."""
    bases, given = {}, {}
    for module in modules:
        for node in ast.walk(module):
            if not isinstance(node, ast.ClassDef):
                continue
            bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
            for part in node.body:
                if (
                    isinstance(part, ast.Assign)
                    and isinstance(part.value, ast.Constant)
                    and [target.id for target in part.targets if isinstance(target, ast.Name)] == ["status"]
                ):
                    given[node.name] = part.value.value

    def status(name: str) -> int | None:
        own = given.get(name)
        return own or next((found for base in bases.get(name, ()) if (found := status(base))), None)

    return {name: found for name in bases if (found := status(name))}


def codes_in_the_source() -> dict[str, set[int]]:
    """Code → the statuses with which it is raised, where they stand beside it."""
    modules = list(trees())
    by_class = statuses(modules)
    found: dict[str, set[int]] = {}

    def look(node: ast.AST, inside: str) -> None:
        if isinstance(node, ast.ClassDef):
            inside = node.name
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            constants = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            named = [word.value for word in node.keywords if word.arg == "code"]
            code = next((value.value for value in named if isinstance(value, ast.Constant)), None)
            if name in ("_unavailable", "_refuse"):  # (message, code), (call, code, message)
                code = next(
                    (text for text in constants if re.fullmatch(r"[a-z]+(_[a-z]+)*", str(text))), None
                )
            if isinstance(code, str):
                status = next((number for number in constants if isinstance(number, int)), None)
                status = status or by_class.get(inside if name == "__init__" else name)
                found.setdefault(code, set()).update({status} if status else ())
        for child in ast.iter_child_nodes(node):
            look(child, inside)

    for module in modules:
        look(module, "")
    return found


def test_every_reason_is_explained() -> None:
    explained = [row[0].strip("`") for row in rows(PAGE, "reason")]
    assert sorted(explained) == sorted(Reason)


def test_every_code_is_explained_with_its_status() -> None:
    explained = {row[0].strip("`"): int(row[1]) for row in rows(PAGE, "code")}
    found = codes_in_the_source()
    assert explained.keys() == found.keys()
    wrong = {code: status for code, status in explained.items() if found[code] and status not in found[code]}
    assert not wrong, found


def test_every_reason_for_matching_by_text_is_explained() -> None:
    table = rows((ROOT / "gateway" / "README.md").read_text(), "reason")
    explained = [name for row in table for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(explained) == sorted(reason.value for reason in TextReason)
