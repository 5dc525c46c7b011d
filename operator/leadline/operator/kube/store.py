"""A copy of our objects in the cluster, kept current by watches and corrected by complete lists.

Objects are grouped by service: (namespace, name of the InferenceService). An older version never replaces a
newer one, in whatever order a watch, a list and the answer to our own write arrive. A child belongs to the
service that controls it; only an object without such a controller (a pod, controlled by a ReplicaSet) is
assigned by its label. So a child that loses its label is still found and applied again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from leadline.operator.kube.kinds import POD, SERVICE, Kind
from leadline.operator.names import SERVICE_LABEL
from leadline.protocol.isvc import GROUP, KIND

__all__ = ["Key", "Store", "service_of"]

Object = dict[str, Any]
Key = tuple[str, str]
"""Namespace and name of an InferenceService."""


def service_of(kind: Kind, item: Object) -> Key | None:
    """The service that an object belongs to, or is."""
    metadata = item["metadata"]
    if kind == SERVICE:
        return metadata["namespace"], metadata["name"]
    name = _owner(metadata) or (metadata.get("labels") or {}).get(SERVICE_LABEL)
    return (metadata["namespace"], name) if name else None


def _owner(metadata: Object) -> str:
    """Name of the InferenceService that controls an object; empty if none does."""
    for owner in metadata.get("ownerReferences") or []:
        group = str(owner.get("apiVersion", "")).partition("/")[0]
        if owner.get("controller") and (group, owner.get("kind")) == (GROUP, KIND):
            return str(owner["name"])
    return ""


class Store:
    def __init__(self) -> None:
        self._items: dict[Key, dict[tuple[str, str], Object]] = {}
        """Service → (kind, name) → object."""
        self._keys: dict[tuple[str, str, str], Key] = {}
        """(kind, namespace, name) → service, of all that is in `_items`."""

    def services(self) -> list[Key]:
        """Every service that exists or has left something behind."""
        return list(self._items)

    def get(self, key: Key, kind: Kind, name: str) -> Object | None:
        return self._items.get(key, {}).get((kind.kind, name))

    def service(self, key: Key) -> Object | None:
        return self.get(key, SERVICE, key[1])

    def children(self, key: Key) -> dict[tuple[str, str], Object]:
        items = self._items.get(key, {})
        return {place: item for place, item in items.items() if place[0] not in (SERVICE.kind, POD.kind)}

    def pods(self, key: Key) -> list[Object]:
        return [item for (kind, _), item in self._items.get(key, {}).items() if kind == POD.kind]

    def put(self, kind: Kind, item: Object) -> Key | None:
        """Take an object in; the service it concerns, None if that changes nothing. An object that is no
        longer a service's leaves it."""
        metadata, key = item["metadata"], service_of(kind, item)
        place = kind.kind, metadata["name"]
        before = self._keys.get((kind.kind, metadata["namespace"], metadata["name"]))
        old = self._items.get(before, {}).get(place) if before is not None else None
        if old is not None and not _newer(item, old):
            return None
        if before is not None and before != key:
            self._drop(before, place)
        if key is None:
            return before
        self._items.setdefault(key, {})[place] = item
        self._keys[kind.kind, metadata["namespace"], metadata["name"]] = key
        return key

    def remove(self, kind: Kind, item: Object) -> Key | None:
        metadata = item["metadata"]
        key = self._keys.get((kind.kind, metadata["namespace"], metadata["name"]))
        if key is None:
            return None
        place = kind.kind, metadata["name"]
        if self._items[key][place]["metadata"].get("uid") != metadata.get("uid"):
            return None  # a successor of the same name is there already
        self._drop(key, place)
        return key

    def _drop(self, key: Key, place: tuple[str, str]) -> None:
        items = self._items[key]
        del items[place], self._keys[place[0], key[0], place[1]]
        if not items:
            del self._items[key]

    def replace_all(
        self, kind: Kind, listed: Iterable[Object], version: str, namespace: str = ""
    ) -> set[Key]:
        """Take in a complete list: what is not in it and not newer than it is gone. The services that it
        changes something for. `version`: the list's resourceVersion; `namespace`: what was listed, empty for
        all."""
        changed: set[Key] = set()
        seen: set[tuple[str, str]] = set()
        for item in listed:
            seen.add((item["metadata"]["namespace"], item["metadata"]["name"]))
            if (key := self.put(kind, item)) is not None:
                changed.add(key)
        for key, items in list(self._items.items()):
            if namespace and key[0] != namespace:
                continue
            for (name_of_kind, name), item in list(items.items()):
                if name_of_kind != kind.kind or (key[0], name) in seen:
                    continue
                if _version(item["metadata"].get("resourceVersion")) <= _version(version):
                    self.remove(kind, item)
                    changed.add(key)
        return changed


def _newer(item: Object, old: Object) -> bool:
    """Whether `item` is a later state. Resource versions are numbers that grow, also across a delete and a
    new create (Kubernetes has declared them comparable since 1.35)."""
    return _version(item["metadata"].get("resourceVersion")) > _version(
        old["metadata"].get("resourceVersion")
    )


def _version(text: object) -> int:
    return int(str(text)) if str(text).isdecimal() else 0
