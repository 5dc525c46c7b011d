"""The names that clients say for a service, and which of them lead to another one.

Room: operator. Pure. Nothing keeps two services from one name; the gateway gives it to the first of them by
NAMESPACE/NAME (gateway/services.py), and the other's status must say so, for nobody else will.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from leadline.operator.store import Key

__all__ = ["Claims", "client_names", "names_elsewhere"]


def client_names(service: dict[str, Any]) -> list[str]:
    """Of an InferenceService as the API server has it."""
    spec = service.get("spec") or {}
    return [spec.get("servedName") or service["metadata"]["name"], *(spec.get("aliases") or [])]


def names_elsewhere(service: dict[str, Any], others: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Name → the service, as NAMESPACE/NAME, that has it in place of `service`."""
    own, names = _place(service), client_names(service)
    found: dict[str, str] = {}
    for other in others:
        place = _place(other)
        if place >= own:
            continue
        claimed = client_names(other)
        for name in names:
            if name in claimed and place < found.get(name, own):
                found[name] = place
    return found


class Claims:
    """Who has which name for clients, so that who gains or loses one by a change is told."""

    def __init__(self) -> None:
        self._names: dict[Key, frozenset[str]] = {}
        self._claimants: dict[str, set[Key]] = {}
        """The same the other way round."""

    def change(self, key: Key, service: dict[str, Any] | None) -> set[Key]:
        """Other services that share a name which `service` now has, or had (None: it is gone), and not
        both."""
        now = frozenset(client_names(service)) if service is not None else frozenset()
        before = self._names.pop(key, frozenset())
        if now:
            self._names[key] = now
        for name in now - before:
            self._claimants.setdefault(name, set()).add(key)
        others = {other for name in now ^ before for other in self._claimants[name] if other != key}
        for name in before - now:
            self._claimants[name].discard(key)
            if not self._claimants[name]:
                del self._claimants[name]
        return others


def _place(service: dict[str, Any]) -> str:
    return f"{service['metadata']['namespace']}/{service['metadata']['name']}"
