"""The operator as kopf runs it: startup, login, watches, liveness, cleanup. A good first file to read.

    on.startup ─▶ configure kopf; start the Controller's tasks: complete lists, the Lease, and in the replica
                  that holds it the workers, the autoscaler and the probes of starting pods
    on.event   ─▶ Store ─▶ WorkQueue ─▶ workers: reconcile one service
    on.probe   ─▶ what the liveness endpoint reports
    on.cleanup ─▶ stop the tasks, give up the Lease

Only `on.event` handlers watch: they are level-triggered, and with them kopf puts neither finalizers nor
annotations on objects. Its timers and daemons would put a finalizer on every InferenceService, so that no
delete could end while the operator is away (P6). So the periodic work runs in tasks of the Controller. kopf's
indices cannot take in the answers to our own writes, as the Store does. Decision 031 has the numbers.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import kopf

from leadline.operator.controller import Controller
from leadline.operator.kube.kinds import CHILDREN, POD, SERVICE, Kind
from leadline.operator.names import MANAGED_SELECTOR
from leadline.protocol.isvc import GROUP, PLURAL, VERSION, label

__all__ = ["registry"]

registry = kopf.get_default_registry()
"""Where the decorators below register the handlers."""
_WATCHED = {kind.plural: kind for kind in (*CHILDREN, POD)}


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    settings.posting.enabled = False  # we write our own Events
    settings.scanning.disabled = True  # the kinds are known: no right to list CRDs and namespaces is needed
    settings.persistence.finalizer = label("unused")
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    settings.networking.request_timeout = 30
    settings.queueing.idle_timeout = 1.0
    for kind in _WATCHED.values():
        settings.watching.label_selectors[kind.group, kind.version, kind.plural] = MANAGED_SELECTOR
    controller: Controller = memo.controller
    await controller.start()


@kopf.on.login()
def login(**arguments: Any) -> kopf.ConnectionInfo | None:
    """Credentials of kopf's watches: the pod's service account, else the kubeconfig.

    In a pod, watches go to the address that all other requests use (KUBERNETES_SERVICE_HOST): kopf's own
    choice is the name `kubernetes.default.svc`, which needs DNS.
    """
    found = kopf.login_with_service_account(**arguments)
    if found is None:
        return kopf.login_with_kubeconfig(**arguments)
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return found
    return dataclasses.replace(
        found, server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    )


@kopf.on.event(GROUP, VERSION, PLURAL)
async def service_changed(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
    _observe(memo.controller, SERVICE, event)


@kopf.on.event("v1", "pods")
@kopf.on.event("v1", "services")
@kopf.on.event("v1", "configmaps")
@kopf.on.event("v1", "serviceaccounts")
@kopf.on.event("v1", "persistentvolumeclaims")
@kopf.on.event("apps", "v1", "deployments")
@kopf.on.event("policy", "v1", "poddisruptionbudgets")
@kopf.on.event("networking.k8s.io", "v1", "networkpolicies")
async def child_changed(event: kopf.RawEvent, resource: kopf.Resource, memo: kopf.Memo, **_: Any) -> None:
    _observe(memo.controller, _WATCHED[resource.plural], event)


@kopf.on.probe(id="synced")
def is_synced(memo: kopf.Memo, **_: Any) -> bool:
    """Whether the first complete list is in."""
    return bool(memo.controller.synced.is_set())


@kopf.on.probe(id="leading")
def is_leading(memo: kopf.Memo, **_: Any) -> bool:
    """Whether this replica acts."""
    return bool(memo.controller.leading)


@kopf.on.probe(id="queued")
def queue_length(memo: kopf.Memo, **_: Any) -> int:
    """Services waiting for a pass."""
    return len(memo.controller.queue)


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    await memo.controller.stop()


def _observe(controller: Controller, kind: Kind, event: kopf.RawEvent) -> None:
    item: dict[str, Any] = dict(event["object"])
    # Items of a list come without apiVersion and kind.
    item.setdefault("kind", kind.kind)
    item.setdefault("apiVersion", kind.api_version)
    controller.observe(kind, item, deleted=event["type"] == "DELETED")
