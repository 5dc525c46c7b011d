"""docs/gateway-settings.md has every setting of the gateway's file, with its default and description."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import NODEFAULT, Struct, structs

from leadline.gateway.config.file import read_config
from leadline.gateway.config.settings import GatewayConfig, ServiceConfig

PAGE = (Path(__file__).parents[2] / "docs" / "gateway-settings.md").read_text()


def described(kind: type[Struct]) -> dict[str, str]:
    """Field → the text below it in the source."""
    (body,) = (
        node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef)
    )
    found, name = {}, ""
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            found[name] = ""
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            found[name] = " ".join(str(node.value.value).split())
    return found


def rows(kind: type[Struct], path: str = "") -> Iterator[str]:
    texts = described(kind)
    for field in structs.fields(kind):
        made = field.default if field.default_factory is NODEFAULT else field.default_factory()
        if isinstance(made, Struct):
            yield from rows(type(made), f"{path}{field.name}.")
            continue
        default = "required" if made is NODEFAULT else f"`{json.dumps(msgspec.to_builtins(made))}`"
        yield f"| `{path}{field.name}` | {default} | {texts[field.name]} |"


def table(title: str) -> list[str]:
    part = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `.*$", part, re.MULTILINE)


def test_the_page_has_every_setting() -> None:
    assert table("Settings") == list(rows(GatewayConfig))
    assert table("Per-service settings") == list(rows(ServiceConfig))


def test_every_setting_is_described() -> None:
    assert not [row for kind in (GatewayConfig, ServiceConfig) for row in rows(kind) if row.endswith("|  |")]


def test_the_example_is_a_file_that_the_gateway_reads(tmp_path: Path) -> None:
    example: Any = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "gateway.yaml"
    file.write_text(example[1])
    assert read_config(file).services[0].name == yaml.safe_load(example[1])["services"][0]["name"]
