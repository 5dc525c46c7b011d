"""The store: newest wins, complete lists remove what is gone."""

from __future__ import annotations

from typing import Any

import pytest

from leadline.operator.kube.kinds import BY_KIND, POD, SERVICE
from leadline.operator.kube.store import Store
from leadline.operator.names import SERVICE_LABEL
from leadline.protocol.isvc import API_VERSION, KIND

DEPLOYMENT = BY_KIND["Deployment"]
KEY = ("team", "qwen")


def item(
    name: str, version: int, *, uid: str = "u", ours: bool = True, namespace: str = "team"
) -> dict[str, Any]:
    labels = {SERVICE_LABEL: "qwen"} if ours else {}
    metadata = {
        "namespace": namespace,
        "name": name,
        "uid": uid,
        "resourceVersion": str(version),
        "labels": labels,
    }
    return {"metadata": metadata}


def test_objects_are_found_by_the_service_they_belong_to() -> None:
    store = Store()
    assert store.put(SERVICE, item("qwen", 1)) == KEY
    assert store.put(DEPLOYMENT, item("d", 2)) == KEY
    assert store.put(POD, item("p", 3)) == KEY
    assert store.put(POD, item("stranger", 3, ours=False)) is None
    assert set(store.children(KEY)) == {("Deployment", "d")}
    assert len(store.pods(KEY)) == 1
    assert store.services() == [KEY]


def test_an_older_version_never_replaces_a_newer_one() -> None:
    store = Store()
    store.put(DEPLOYMENT, item("d", 10))
    assert store.put(DEPLOYMENT, item("d", 9)) is None
    assert store.put(DEPLOYMENT, item("d", 10)) is None
    assert store.put(DEPLOYMENT, item("d", 11)) == KEY


def test_the_end_of_an_object_does_not_remove_its_successor() -> None:
    store = Store()
    store.put(POD, item("p", 5, uid="new"))
    assert store.remove(POD, item("p", 4, uid="old")) is None
    assert store.pods(KEY)
    assert store.remove(POD, item("p", 6, uid="new")) == KEY
    assert store.services() == []


def test_a_complete_list_removes_what_is_gone_but_nothing_that_is_newer_than_it() -> None:
    store = Store()
    store.put(POD, item("gone", 5))
    store.put(POD, item("newer", 30))
    store.put(POD, item("elsewhere", 5, namespace="other"))
    changed = store.replace_all(POD, [item("come", 12)], "20", "team")
    assert changed == {KEY}
    assert {one["metadata"]["name"] for one in store.pods(KEY)} == {"come", "newer"}
    assert store.pods(("other", "qwen"))
    assert store.replace_all(POD, [item("come", 12), item("newer", 30)], "40", "team") == set()


def owned(version: int, labels: dict[str, str]) -> dict[str, Any]:
    made = item("d", version)
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": "qwen", "uid": "s", "controller": True}
    made["metadata"] |= {"labels": labels, "ownerReferences": [owner]}
    return made


@pytest.mark.parametrize("labels", [{}, {SERVICE_LABEL: "other"}])
def test_a_child_that_loses_its_label_is_still_its_owners(labels: dict[str, str]) -> None:
    store = Store()
    store.put(DEPLOYMENT, owned(1, {SERVICE_LABEL: "qwen"}))
    assert store.put(DEPLOYMENT, owned(2, labels)) == KEY
    assert store.children(KEY)["Deployment", "d"]["metadata"]["labels"] == labels
    assert store.services() == [KEY]
    assert store.remove(DEPLOYMENT, owned(3, labels)) == KEY
    assert store.services() == []


def test_a_pod_whose_label_is_taken_away_leaves_its_service() -> None:
    store = Store()
    store.put(POD, item("p", 1))
    assert store.put(POD, item("p", 2, ours=False)) == KEY
    assert store.pods(KEY) == []
    assert store.put(POD, item("p", 3)) == KEY
    assert len(store.pods(KEY)) == 1


def test_another_kind_of_owner_does_not_make_an_object_a_services() -> None:
    stranger = owned(1, {})
    stranger["metadata"]["ownerReferences"][0]["apiVersion"] = "serving.kserve.io/v1beta1"
    assert Store().put(DEPLOYMENT, stranger) is None
