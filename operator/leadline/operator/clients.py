"""The names that clients say for a service, and which of them lead to another one.

Room: operator. Pure. Nothing keeps two services from one name; the gateway gives it to the first of them by
NAMESPACE/NAME (gateway/services.py), and the other's status must say so, for nobody else will.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["client_names", "names_elsewhere"]


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


def _place(service: dict[str, Any]) -> str:
    return f"{service['metadata']['namespace']}/{service['metadata']['name']}"
