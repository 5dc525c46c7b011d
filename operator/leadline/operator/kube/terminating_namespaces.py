"""Namespaces that are being deleted, in which the operator writes nothing more.

The API server refuses whatever would be created there, and the rest is about to go: putting
children back would only hold the deletion up. The operator may not read namespaces; it learns of a deletion
from the first refusal. A deletion is never taken back, so a service that was not there then is one of a new
namespace of that name.
"""

from __future__ import annotations

import logging
from typing import Any

from leadline.operator.kube.store import Store

__all__ = ["TerminatingNamespaces"]

log = logging.getLogger(__name__)


class TerminatingNamespaces:
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
