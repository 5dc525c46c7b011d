"""Leader election: only the replica that holds a Lease acts (P24).

As in client-go, the holder renews the Lease, and another replica takes it when it has not changed for its
duration on that replica's own clock, so that clocks need not agree. A holder that cannot renew in time stops
before another may start. The election of `kubernetes.aio` does not stop in these cases (decision 031).
Source: coordination.k8s.io/v1 Lease.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from datetime import UTC, datetime
from typing import Any

import aiohttp

from leadline.operator.kube.api import ApiError, Conflict, KubeApi, NotFound
from leadline.operator.kube.kinds import Kind

__all__ = ["LEASE", "LeaderElection"]

log = logging.getLogger(__name__)

LEASE = Kind("Lease", "coordination.k8s.io/v1", "leases")


class LeaderElection:
    """`run` it as a task; `leading` is set while this replica may act."""

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        name: str,
        identity: str,
        duration: float,
        owner: dict[str, Any] | None = None,
    ) -> None:
        """`owner`: the operator's Deployment, with which the Lease goes when the operator is uninstalled."""
        self._api = api
        self._owners: list[dict[str, Any]] = [] if owner is None else [_reference(owner)]
        self._missing_since: float | None = None
        """When a Lease that was there had gone."""
        self._namespace, self._name, self._identity = namespace, name, identity
        self._duration = duration
        self._seen: tuple[str, float] = ("", 0.0)
        """resourceVersion of the Lease last seen, and when it was first seen, on our clock."""
        self._renewed = 0.0
        self.leading = asyncio.Event()
        self.lost = asyncio.Event()

    async def run(self) -> None:
        try:
            while True:
                await self._round()
                await asyncio.sleep(self._duration / (3 if self.leading.is_set() else 5))
        finally:
            if self.leading.is_set():
                await self._release()

    async def _round(self) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._duration / 3):
                held = await self._acquire_or_renew()
        except (ApiError, aiohttp.ClientError, TimeoutError) as error:
            log.warning("lease %s/%s: %s", self._namespace, self._name, str(error) or type(error).__name__)
            # No other replica may take the Lease before its duration is over; we stop at two thirds of it, in
            # which the time counts that this request has waited for an answer.
            held = self.leading.is_set() and time.monotonic() - self._renewed < self._duration * 2 / 3
        else:
            if held:
                self._renewed = began
        if held and not self.leading.is_set():
            log.info("leading as %s", self._identity)
            self.lost.clear()
            self.leading.set()
        elif not held and self.leading.is_set():
            log.warning("no longer leading")
            self.leading.clear()
            self.lost.set()

    async def _acquire_or_renew(self) -> bool:
        try:
            lease = await self._api.get(LEASE, self._namespace, self._name)
        except NotFound:
            if self._seen[0] and not self._is_missed():
                return False
            return await self._write(None)
        self._missing_since = None
        holder = lease.get("spec", {}).get("holderIdentity") or ""
        version = lease["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = version, time.monotonic()
        duration = float(lease.get("spec", {}).get("leaseDurationSeconds") or self._duration)
        if holder not in ("", self._identity) and time.monotonic() - self._seen[1] < duration:
            return False
        return await self._write(lease)

    def _is_missed(self) -> bool:
        """Whether the Lease has been gone for its duration. An uninstallation deletes it before it stops the
        process, which must not create it again in between."""
        if self._missing_since is None:
            self._missing_since = time.monotonic()
        return time.monotonic() - self._missing_since >= self._duration

    async def _write(self, old: dict[str, Any] | None) -> bool:
        """Make the Lease ours. False if another was faster."""
        write = self._api.create if old is None else self._api.replace
        try:
            try:
                await write(self._lease(old), LEASE)
            except ApiError as error:
                if not (self._owners and error.is_permanent):
                    raise
                log.warning("the Lease cannot be tied to the operator's Deployment: %s", error)
                self._owners = []
                await write(self._lease(old), LEASE)
        except Conflict:
            return False
        return True

    def _lease(self, old: dict[str, Any] | None) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = dict((old or {}).get("spec") or {})
        if spec.get("holderIdentity") != self._identity:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + (1 if old else 0)
        spec |= {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(math.ceil(self._duration), 1),
            "renewTime": now,
        }
        metadata: dict[str, Any] = {"namespace": self._namespace, "name": self._name}
        if owners := self._owners or (old or {"metadata": {}})["metadata"].get("ownerReferences"):
            metadata["ownerReferences"] = owners
        if old is not None:
            metadata["resourceVersion"] = old["metadata"]["resourceVersion"]
        return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata, "spec": spec}

    async def _release(self) -> None:
        """On a clean exit, let the next one act at once."""
        self.leading.clear()
        try:
            async with asyncio.timeout(2):
                lease = await self._api.get(LEASE, self._namespace, self._name)
                if lease.get("spec", {}).get("holderIdentity") == self._identity:
                    free = self._lease(lease)
                    free["spec"]["holderIdentity"] = ""
                    await self._api.replace(free, LEASE)
        except (ApiError, aiohttp.ClientError, TimeoutError) as error:
            log.warning("the lease could not be released: %s", error)


def _reference(owner: dict[str, Any]) -> dict[str, Any]:
    metadata = owner["metadata"]
    kind = {"apiVersion": owner["apiVersion"], "kind": owner["kind"]}
    return {**kind, "name": metadata["name"], "uid": metadata["uid"]}
