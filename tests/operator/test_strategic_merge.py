"""Strategic merge patch, against what Kubernetes documents of it."""

from __future__ import annotations

from typing import Any

import pytest

from leadline.operator.objects.strategic import strategic_merge

BASE: dict[str, Any] = {
    "nodeSelector": {"a": "1"},
    "tolerations": [{"key": "x"}],
    "containers": [
        {
            "name": "engine",
            "args": ["one", "two"],
            "env": [{"name": "A", "valueFrom": {"fieldRef": {}}}, {"name": "B", "value": "b"}],
            "ports": [{"name": "http", "containerPort": 8000}],
        }
    ],
    "volumes": [{"name": "cache", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
}


def engine(patch: dict[str, Any]) -> dict[str, Any]:
    merged = strategic_merge(BASE, {"containers": [{"name": "engine", **patch}]})
    found: dict[str, Any] = merged["containers"][0]
    return found


@pytest.mark.parametrize(
    ("patch", "field", "expected"),
    [
        ({"nodeSelector": {"b": "2"}}, "nodeSelector", {"a": "1", "b": "2"}),
        ({"nodeSelector": {"a": None}}, "nodeSelector", {}),
        ({"nodeSelector": None}, "nodeSelector", None),
        ({"nodeSelector": {"$patch": "delete"}}, "nodeSelector", None),
        ({"nodeSelector": {"$patch": "replace", "c": "3"}}, "nodeSelector", {"c": "3"}),
        ({"tolerations": [{"key": "y"}]}, "tolerations", [{"key": "y"}]),
        (
            {"volumes": [{"name": "cache", "hostPath": {"path": "/m"}}]},
            "volumes",
            [{"name": "cache", "hostPath": {"path": "/m"}}, {"name": "tmp", "emptyDir": {}}],
        ),
        ({"volumes": [{"name": "tmp", "$patch": "delete"}]}, "volumes", [{"name": "cache", "emptyDir": {}}]),
        ({"volumes": [{"$patch": "replace"}, {"name": "z"}]}, "volumes", [{"name": "z"}]),
        ({"hostNetwork": True}, "hostNetwork", True),
    ],
)
def test_fields_of_the_pod(patch: dict[str, Any], field: str, expected: object) -> None:
    assert strategic_merge(BASE, patch).get(field) == expected


def test_containers_merge_by_name_and_new_ones_come_last() -> None:
    merged = strategic_merge(BASE, {"containers": [{"name": "side"}, {"name": "engine", "image": "i"}]})
    assert [one["name"] for one in merged["containers"]] == ["engine", "side"]
    assert merged["containers"][0]["image"] == "i"
    assert merged["containers"][0]["args"] == ["one", "two"]


def test_lists_of_plain_values_are_replaced() -> None:
    assert engine({"args": ["three"]})["args"] == ["three"]


def test_an_environment_variable_changes_its_kind_of_source() -> None:
    assert engine({"env": [{"name": "A", "value": "a"}]})["env"][0] == {"name": "A", "value": "a"}


def test_the_base_is_not_changed() -> None:
    before = repr(BASE)
    engine({"args": [], "env": [{"name": "C", "value": "c"}], "ports": [{"containerPort": 1}]})
    assert repr(BASE) == before
