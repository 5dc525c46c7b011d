"""docs/inferenceservice.md has every field of the CustomResourceDefinition, with its limits, default and
description."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from leadline.cli.serve import add_arguments
from leadline.operator.crd.generate import crd
from leadline.operator.objects.strategic import misshapen
from leadline.protocol.isvc_types import InferenceServiceSpec

PAGE = (Path(__file__).parents[2] / "docs" / "inferenceservice.md").read_text()
SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]


def values(schema: dict[str, Any]) -> str:
    """What a field may be."""
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "x-kubernetes-int-or-string" in schema:
        return "number or percentage"
    kind = {"array": "list", "object": "map"}.get(schema["type"], schema["type"])
    if "minimum" in schema and "maximum" in schema:
        above = "above " if schema.get("exclusiveMinimum") else ""
        return f"{kind}, {above}{schema['minimum']} to {schema['maximum']}"
    return f"{kind}, from {schema['minimum']}" if "minimum" in schema else kind


def shown(default: Any) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


def rows(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, field in schema["properties"].items():
        here, inner = f"{path}{name}", "properties" in field
        if inner:
            kind = default = ""
        else:
            kind = values(field)
            default = f"`{shown(field['default'])}`" if "default" in field else ""
            if name in schema.get("required", ()):
                default = "required"
        yield f"| `{here}` | {kind} | {default} | {field.get('description', '')} |"
        if inner:
            yield from rows(field, f"{here}.")


@pytest.mark.parametrize("part", ["spec", "status"])
def test_the_page_has_every_field(part: str) -> None:
    table = PAGE.split(f"\n## {part}\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `.*$", table, re.MULTILINE) == list(rows(SCHEMA[part]))


def test_every_field_is_described() -> None:
    bare = [row for part in ("spec", "status") for row in rows(SCHEMA[part]) if row.endswith("|  |")]
    assert not bare


def test_the_example_is_a_service() -> None:
    example = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])
    spec = msgspec.convert(example["spec"], InferenceServiceSpec)
    assert set(example["spec"]) <= set(SCHEMA["spec"]["properties"])
    assert not misshapen(spec.pod_template or {}, "podTemplate")
    arguments = argparse.ArgumentParser()
    add_arguments(arguments)
    arguments.parse_args(["model", *spec.engine.extra_args])
