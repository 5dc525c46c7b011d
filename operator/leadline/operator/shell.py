"""kopf's part: it watches, and tells the store and the queue.

Handlers are `on.event` only: those are level-triggered, and kopf then puts neither finalizers
nor annotations on anything. What a watch misses while it is broken, a resync finds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kopf

from leadline.operator.kube.kinds import CHILDREN, POD, SERVICE, Kind
from leadline.operator.kube.store import Key, Store
from leadline.operator.names import MANAGED_SELECTOR
from leadline.protocol.isvc import label

__all__ = ["kopf_settings", "login", "watching_registry"]


def login(**arguments: Any) -> kopf.ConnectionInfo | None:
    """The pod's service account, else the kubeconfig ($KUBECONFIG, ~/.kube/config), without any client
    library."""
    return kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)


def kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False  # our Events are ours
    settings.peering.standalone = True  # a Lease decides who acts
    settings.scanning.disabled = True  # the kinds are known: no right to list CRDs and namespaces is needed
    settings.persistence.finalizer = label("unused")
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    settings.networking.request_timeout = 30
    settings.queueing.idle_timeout = 1.0
    for kind in (*CHILDREN, POD):
        settings.watching.label_selectors[kind.group, kind.version, kind.plural] = MANAGED_SELECTOR
    return settings


def watching_registry(store: Store, changed: Callable[[Key, Kind], None]) -> kopf.OperatorRegistry:
    """Handlers that keep `store` up to date; `changed(service, kind)` is called for what they change."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(login)
    for kind in (SERVICE, *CHILDREN, POD):
        _watch(registry, kind, store, changed)
    return registry


def _watch(
    registry: kopf.OperatorRegistry, kind: Kind, store: Store, changed: Callable[[Key, Kind], None]
) -> None:
    async def seen(event: kopf.RawEvent, **_: Any) -> None:
        item: dict[str, Any] = dict(event["object"])
        # Items of a list come without them.
        item.setdefault("kind", kind.kind)
        item.setdefault("apiVersion", kind.api_version)
        take = store.remove if event["type"] == "DELETED" else store.put
        key = take(kind, item)
        if key is not None:
            changed(key, kind)

    kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=f"watch-{kind.plural}")(seen)
