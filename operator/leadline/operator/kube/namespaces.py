"""What the operator knows about namespaces, none of which it may read: which are being deleted, and which
resources their LimitRanges give to containers that request none."""

from __future__ import annotations

import logging
import time
from typing import Any

from leadline.operator.kube.api import ApiError, KubeApi
from leadline.operator.kube.kinds import Kind
from leadline.operator.kube.store import Store

__all__ = ["LIMIT_RANGE", "LimitRanges", "TerminatingNamespaces"]

log = logging.getLogger(__name__)

LIMIT_RANGE = Kind("LimitRange", "v1", "limitranges")
_KEEP_SECONDS = 60.0


class LimitRanges:
    """Listed, not watched: a change matters only for pods that are created later. An answer is kept for a
    minute."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._known: dict[str, tuple[float, frozenset[str]]] = {}
        """Namespace → when it was asked, and what it gives."""
        self._refused = ""

    async def of(self, namespace: str) -> frozenset[str]:
        """Names of resources. The API server fills in the defaults of a LimitRange that has `max` or `min`
        alone. Raises what a failed request raises; where they may not be listed there are none."""
        asked, found = self._known.get(namespace, (0.0, frozenset[str]()))
        if asked and time.monotonic() - asked < _KEEP_SECONDS:
            return found
        try:
            items, _ = await self._api.list(LIMIT_RANGE, namespace)
        except ApiError as error:
            if not error.is_permanent:
                raise
            if str(error) != self._refused:
                self._refused = str(error)
                log.warning("the LimitRanges of namespaces are not heeded: %s", error)
            items = []
        limits = [one for item in items for one in item["spec"].get("limits") or []]
        given = [
            one.get(field) or {}
            for one in limits
            for field in ("default", "defaultRequest")
            if one.get("type") == "Container"
        ]
        found = frozenset(name for amounts in given for name in amounts)
        now = time.monotonic()
        self._known = {name: one for name, one in self._known.items() if now - one[0] < _KEEP_SECONDS}
        self._known[namespace] = now, found
        return found


class TerminatingNamespaces:
    """Namespaces that are being deleted, in which the operator writes nothing more.

    The API server refuses to create anything there, and the rest is about to go: putting children back would
    only delay the deletion. The operator learns of a deletion from the first refusal. A deletion is never
    taken back, so a service that was not there at the time belongs to a new namespace of that name.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._uids: dict[str, set[str]] = {}
        """Namespace → uids of the services that it had when it was found to be terminating."""

    def add(self, namespace: str) -> None:
        """The API server has refused to create something there."""
        if namespace not in self._uids:
            log.info("namespace %s is being deleted: nothing is written there any more", namespace)
        self._uids[namespace] = self._present(namespace)

    def hold(self, service: dict[str, Any]) -> bool:
        """Whether the namespace of a service is being deleted."""
        metadata = service["metadata"]
        uids = self._uids.get(metadata["namespace"])
        if uids is None:
            return False
        if metadata["uid"] in uids:
            return True
        del self._uids[metadata["namespace"]]
        return False

    def forget(self, namespace: str) -> None:
        """A service has gone; with the last one goes the note of its namespace."""
        if namespace in self._uids and not self._present(namespace):
            del self._uids[namespace]

    def _present(self, namespace: str) -> set[str]:
        services = (self._store.service(key) for key in self._store.services() if key[0] == namespace)
        return {str(service["metadata"]["uid"]) for service in services if service is not None}
