"""Reads Events for causes that no status shows: why the kubelet cannot set a pod up (a volume that does not
mount, no network), and why a claim that pods wait for has no volume.

Events are listed, not watched: a cluster has very many, and few concern us. For each service one pod that has
been stuck for `STUCK_SECONDS` is looked up; pods of one template share their failures.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import aiohttp

from leadline.operator.kube.api import ApiError, KubeApi
from leadline.operator.kube.kinds import BY_KIND, EVENT
from leadline.operator.kube.store import Key, Store
from leadline.operator.names import child_name
from leadline.operator.periodic import repeat
from leadline.operator.planning.diagnosis import is_being_set_up, waits_for_claims
from leadline.operator.planning.observed import active_pods

__all__ = ["PodEvents"]

log = logging.getLogger(__name__)

LOOK_SECONDS = 10.0
STUCK_SECONDS = 10.0
"""Shorter failures belong to every start, such as a ConfigMap that the kubelet has yet to see."""
_AT_ONCE = 8


class PodEvents:
    """`run` it as a task while this replica acts. `changed(service)` is called when a message changes."""

    def __init__(
        self,
        api: KubeApi,
        store: Store,
        changed: Callable[[Key], None],
        is_ours: Callable[[dict[str, Any]], bool] = lambda service: True,
    ) -> None:
        self._api, self._store, self._changed, self._is_ours = api, store, changed, is_ours
        self._found: dict[Key, tuple[str, str]] = {}
        """Service → uid of a pod, and the newest warning about it."""
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._refused = ""

    def of(self, key: Key) -> dict[str, str]:
        """Pod uid → the newest warning about it."""
        return dict([self._found[key]]) if key in self._found else {}

    async def run(self) -> None:
        await repeat("Events of stuck pods", self.look, LOOK_SECONDS)

    async def look(self) -> None:
        """Look up every service with a stuck pod, once."""
        stuck = {key: pod for key in self._store.services() if (pod := self._stuck(key)) is not None}
        for key in self._found.keys() - stuck.keys():
            del self._found[key]
        await asyncio.gather(*(self._ask(key, pod) for key, pod in stuck.items()))

    def _stuck(self, key: Key) -> dict[str, Any] | None:
        service = self._store.service(key)
        if service is None or not self._is_ours(service):
            return None
        now = datetime.now(UTC)
        return next((pod for pod in active_pods(self._store.pods(key)) if _stands(pod, now)), None)

    async def _ask(self, key: Key, pod: dict[str, Any]) -> None:
        uid = about = str(pod["metadata"]["uid"])
        if waits_for_claims(pod):
            claim = self._store.get(key, BY_KIND["PersistentVolumeClaim"], child_name(key[1]))
            if claim is None or claim.get("status", {}).get("phase") == "Bound":
                return
            about = str(claim["metadata"]["uid"])
        try:
            async with self._gate:
                events, _ = await self._api.list(
                    EVENT, key[0], fields=f"involvedObject.uid={about},type=Warning"
                )
        except ApiError as error:
            if error.is_permanent and str(error) != self._refused:
                self._refused = str(error)
                log.warning("what is in the way of pods cannot be said: %s", error)
            return
        except (aiohttp.ClientError, TimeoutError):
            return
        text = _newest(events)
        if text and self._found.get(key) != (uid, text):
            self._found[key] = uid, text
            self._changed(key)


def _stands(pod: dict[str, Any], now: datetime) -> bool:
    if not (is_being_set_up(pod) or waits_for_claims(pod)):
        return False
    conditions = pod["status"].get("conditions") or []
    scheduled: dict[str, Any] = next((one for one in conditions if one.get("type") == "PodScheduled"), {})
    began = scheduled.get("lastTransitionTime") or pod["metadata"]["creationTimestamp"]
    return (now - datetime.fromisoformat(began)).total_seconds() >= STUCK_SECONDS


def _newest(events: list[dict[str, Any]]) -> str:
    """Return the newest message; empty if there is none."""

    def said(event: dict[str, Any]) -> str:
        series = event.get("series") or {}
        return str(
            series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or ""
        )

    newest = max(events, key=said, default={})
    return f"{newest.get('reason', '')}: {newest['message']}" if newest.get("message") else ""
