"""When an object is applied again, and when not."""

from __future__ import annotations

import copy
from typing import Any

from leadline.operator.kube.drift import AppliedFields, covers
from leadline.operator.names import HASH_ANNOTATION

WANTED: dict[str, Any] = {
    "kind": "ConfigMap",
    "metadata": {"name": "x", "annotations": {HASH_ANNOTATION: "h1"}},
    "spec": {
        "size": "1024Mi",
        "off": False,
        "none": {},
        "containers": [{"name": "engine", "args": ["a", "b"], "env": [{"name": "E", "value": ""}]}],
    },
}


def live(**spec: Any) -> dict[str, Any]:
    made = copy.deepcopy(WANTED)
    made["metadata"] |= {"uid": "u", "resourceVersion": "7"}
    made["spec"] |= {"defaulted": 1, **spec}
    return made


def test_a_missing_object_and_one_applied_from_another_spec_are_applied() -> None:
    applied = AppliedFields()
    assert applied.must_apply(WANTED, None)
    old = live()
    old["metadata"]["annotations"] = {HASH_ANNOTATION: "h0"}
    assert applied.must_apply(WANTED, old)


def test_foreign_fields_containers_and_defaults_are_no_drift() -> None:
    other = live()
    other["metadata"]["labels"] = {"theirs": "x"}
    other["spec"]["containers"].insert(0, {"name": "sidecar"})
    del other["spec"]["off"], other["spec"]["none"]
    del other["spec"]["containers"][1]["env"][0]["value"]
    assert not AppliedFields().must_apply(WANTED, other)


def test_a_changed_field_of_ours_is_drift() -> None:
    for spec in ({"size": "2Gi"}, {"containers": []}, {"off": True}):
        assert AppliedFields().must_apply(WANTED, live(**spec))
    shorter = live()
    shorter["spec"]["containers"][0]["args"] = ["a", "b", "c"]
    assert AppliedFields().must_apply(WANTED, shorter)


def test_another_spelling_of_our_value_is_applied_once_and_then_known() -> None:
    applied, stored = AppliedFields(), live(size="1Gi")
    assert applied.must_apply(WANTED, stored)
    applied.remember(WANTED, stored)
    assert not applied.must_apply(WANTED, live(size="1Gi"))
    assert applied.must_apply(WANTED, live(size="2Gi"))
    assert not applied.must_apply(WANTED, live())


def test_an_object_that_was_deleted_is_forgotten() -> None:
    applied, stored = AppliedFields(), live(size="1Gi")
    applied.remember(WANTED, stored)
    applied.forget(stored)
    assert applied.must_apply(WANTED, stored)


def test_a_new_object_of_the_same_name_is_compared_by_itself() -> None:
    applied, stored = AppliedFields(), live(size="1Gi")
    applied.remember(WANTED, stored)
    stored["metadata"]["uid"] = "another"
    assert applied.must_apply(WANTED, stored)


def test_an_empty_field_is_met_by_an_absent_one_but_not_by_a_value() -> None:
    assert covers({"a": []}, {})
    assert not covers({"a": []}, {"a": [1]})
    assert not covers({"a": "x"}, {})
    assert not covers({"a": 0}, {"a": 1})
