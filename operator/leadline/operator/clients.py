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

    def change(self, key: Key, service: dict[str, Any] | None) -> list[Key]:
        """Other services that share a name which `service` now has, or had (None: it is gone), and not
        both."""
        now = frozenset(client_names(service)) if service is not None else frozenset()
        changed = now ^ self._names.pop(key, frozenset())
        if now:
            self._names[key] = now
        if not changed:
            return []
        return [
            other for other, names in self._names.items() if other != key and not names.isdisjoint(changed)
        ]


def _place(service: dict[str, Any]) -> str:
    return f"{service['metadata']['namespace']}/{service['metadata']['name']}"
