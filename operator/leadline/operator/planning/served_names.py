"""Decides which names each InferenceService has for clients.

Pure. A service claims its servedName (else its own name), its aliases, and NAMESPACE/NAME. The names it is
given stand in its `status.names`, which only the operator may write and which gateways go by; nothing that a
tenant can put on a Service, a slice or a pod adds a name. A name belongs to

    1. the service that has it in its status already and still claims it,
    2. else the oldest service that claims it,

by creationTimestamp and then uid in both cases. So a name stays with its holder whatever is created or edited
later, and the decision is the same after a restart of the operator and on any clock. docs/decisions/025 has
the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leadline.operator.kube.store import Key
from leadline.protocol.isvc import Reason

__all__ = ["ALL_NAMESPACES", "NameIndex", "Names", "Refusal", "claimed_names", "decide_names"]

ALL_NAMESPACES = "*"
"""Key of the prefixes for namespaces that have none of their own."""


@dataclass(slots=True, frozen=True)
class Refusal:
    """Why a service does not have a name that it claims."""

    reason: Reason
    message: str


@dataclass(slots=True, frozen=True)
class Names:
    """The decision for one service."""

    accepted: tuple[str, ...] = ()
    """In the order of the spec; NAMESPACE/NAME is the last."""
    refused: dict[str, Refusal] = field(default_factory=dict)


def claimed_names(service: dict[str, Any]) -> list[str]:
    """What an InferenceService as the API server has it claims, without repetition."""
    spec, metadata = service.get("spec") or {}, service["metadata"]
    names = [spec.get("servedName") or metadata["name"], *(spec.get("aliases") or []), _place(service)]
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


def decide_names(
    service: dict[str, Any],
    others: Iterable[dict[str, Any]],
    prefixes: Mapping[str, Sequence[str]] | None = None,
) -> Names:
    """Decide for `service` beside the `others`. `prefixes`: namespace, or ALL_NAMESPACES, → beginnings that
    the names of its services must have; `{namespace}` in them stands for the namespace. NAMESPACE/NAME is
    always allowed."""
    prefixes = prefixes or {}
    mine, uid = claimed_names(service), service["metadata"].get("uid")
    rivals = [(one, set(claimed_names(one))) for one in others if one["metadata"].get("uid") != uid]
    accepted, refused = [], {}
    for name in mine:
        if allowed := _not_allowed(service, name, prefixes):
            refused[name] = Refusal(
                Reason.NAME_NOT_ALLOWED,
                f"{name!r} is not allowed in this namespace: names must begin with {_listed(allowed)}",
            )
            continue
        claimants = [one for one, names in rivals if name in names and not _not_allowed(one, name, prefixes)]
        first = min([service, *claimants], key=lambda one: _rank(one, name))
        if first is service:
            accepted.append(name)
        else:
            refused[name] = Refusal(Reason.NAME_TAKEN, f"{name!r} belongs to {_place(first)}")
    return Names(tuple(accepted), refused)


class NameIndex:
    """Maps names to the services that claim them, and tells which services a change affects."""

    def __init__(self) -> None:
        self._states: dict[Key, frozenset[tuple[str, bool]]] = {}
        """Service → each name it claims, and whether it has it."""
        self._claimants: dict[str, set[Key]] = {}

    def rivals(self, key: Key, service: dict[str, Any]) -> set[Key]:
        """Other services that claim a name of `service`."""
        return {
            other
            for name in claimed_names(service)
            for other in self._claimants.get(name, ())
            if other != key
        }

    def change(self, key: Key, service: dict[str, Any] | None) -> set[Key]:
        """Take in the new state of a service; None: it is gone. Returns the other services for which the
        decision may now be another one."""
        names = claimed_names(service) if service is not None else []
        held = _held(service) if service is not None else set()
        now = frozenset((name, name in held) for name in names)
        before = self._states.pop(key, frozenset())
        if now:
            self._states[key] = now
        for name in names:
            self._claimants.setdefault(name, set()).add(key)
        changed = {name for name, _ in now ^ before}
        others = {other for name in changed for other in self._claimants[name] if other != key}
        for name in {name for name, _ in before}.difference(names):
            self._claimants[name].discard(key)
            if not self._claimants[name]:
                del self._claimants[name]
        return others


def _held(service: dict[str, Any]) -> set[str]:
    return set((service.get("status") or {}).get("names") or [])


def _rank(service: dict[str, Any], name: str) -> tuple[bool, str, str]:
    """The lowest has the name."""
    metadata = service["metadata"]
    return (
        name not in _held(service),
        str(metadata.get("creationTimestamp") or ""),
        str(metadata.get("uid") or ""),
    )


def _not_allowed(service: dict[str, Any], name: str, prefixes: Mapping[str, Sequence[str]]) -> list[str]:
    """The prefixes that `name` must have one of and has none of; empty where it is allowed."""
    namespace = service["metadata"]["namespace"]
    found = prefixes.get(namespace, prefixes.get(ALL_NAMESPACES))
    if found is None or name == _place(service):
        return []
    wanted = [one.replace("{namespace}", namespace) for one in found]
    return [] if name.startswith(tuple(wanted)) else wanted


def _listed(prefixes: Sequence[str]) -> str:
    return " or ".join(map(repr, prefixes))


def _place(service: dict[str, Any]) -> str:
    return f"{service['metadata']['namespace']}/{service['metadata']['name']}"
