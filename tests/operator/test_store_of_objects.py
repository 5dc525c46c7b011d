"""The store: newest wins, complete lists remove what is gone."""

from __future__ import annotations

from typing import Any

from leadline.operator.kinds import BY_KIND, POD, SERVICE
from leadline.operator.names import SERVICE_LABEL
from leadline.operator.store import Store

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
