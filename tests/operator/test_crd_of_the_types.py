"""The generated CRD: up to date, structural, and complete."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from leadline.operator.crd.generate import crd, crd_yaml, main
from leadline.operator.crd.schema import object_schema
from leadline.protocol.isvc_types import InferenceServiceSpec

ROOT = Path(__file__).resolve().parents[2]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from nodes(part, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from nodes(schema[name], f"{path}[]")


def schema() -> dict[str, Any]:
    result: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return result


def test_the_file_in_manifests_is_what_the_types_say() -> None:
    assert (ROOT / "manifests/crd.yaml").read_text(encoding="utf-8") == crd_yaml()


def test_check_fails_for_a_file_that_is_not(tmp_path: Path) -> None:
    stale = tmp_path / "crd.yaml"
    assert main([str(stale), "--check"]) == 1
    assert main([str(stale)]) == 0
    assert main([str(stale), "--check"]) == 0
    stale.write_text(stale.read_text().replace("tensorParallel", "tensorParallell"))
    assert main([str(stale), "--check"]) == 1


def test_every_node_has_a_type_and_every_rule_a_sentence() -> None:
    for path, node in nodes(schema()):
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path
        assert "$ref" not in node
        for rule in node.get("x-kubernetes-validations", []):
            assert len(rule["message"].split()) > 4, path


def test_texts_lists_and_maps_of_the_spec_are_bounded_so_that_rules_have_a_bounded_cost() -> None:
    for path, node in nodes(schema()["properties"]["spec"]):
        if node.get("type") == "string" and "enum" not in node:
            assert "maxLength" in node, path
        if node.get("type") == "array":
            assert "maxItems" in node, path


def test_the_defaults_are_those_of_the_types() -> None:
    spec = msgspec.to_builtins(msgspec.convert({"model": "smollm2"}, InferenceServiceSpec))
    for name, node in schema()["properties"]["spec"]["properties"].items():
        if "default" in node:
            given = (
                {key: value for key, value in spec[name].items() if value not in (None, [], {})}
                if isinstance(spec[name], dict)
                else spec[name]
            )
            assert node["default"] == given, name


def test_replicas_have_no_default_that_an_apply_without_them_would_write() -> None:
    assert "default" not in schema()["properties"]["spec"]["properties"]["replicas"]


def test_scale_status_columns_and_short_name() -> None:
    version = crd()["spec"]["versions"][0]
    assert version["subresources"]["scale"]["labelSelectorPath"] == ".status.selector"
    columns = [column["name"].upper() for column in version["additionalPrinterColumns"]]
    assert version["additionalPrinterColumns"][-1]["priority"] == 1, "for -o wide alone"
    assert columns.pop() == "MESSAGE"
    assert columns == ["MODEL", "READY", "DESIRED", "TP", "REASON", "URL", "AGE"]
    assert crd()["spec"]["names"]["shortNames"] == ["isvc"]


def test_a_type_that_has_no_structural_schema_is_refused() -> None:
    class Odd(msgspec.Struct):
        pair: tuple[int, str]

    with pytest.raises(TypeError, match="structural"):
        object_schema(Odd)
