"""Carries out what the autoscaler decides, for all services with `autoscaling`.

Room: operator. Asks the pods themselves how many requests they hold, and drives `/scale`. Steps aside for a
service that a HorizontalPodAutoscaler scales. Scaling up for requests that no pod holds yet is the gateway's
to ask for and comes with scaling to zero.
"""

from __future__ import annotations

import asyncio
import logging
import time

import aiohttp
import msgspec

from leadline.operator.api import ApiClient, ApiError
from leadline.operator.autoscaler import Scaler
from leadline.operator.kinds import SERVICE
from leadline.operator.observed import scaled_by_autoscaler
from leadline.operator.progress import PodProbe
from leadline.operator.settings import OperatorSettings
from leadline.operator.store import Key, Store
from leadline.protocol.isvc_types import Autoscaling, InferenceServiceSpec

__all__ = ["ServiceScaler"]

log = logging.getLogger(__name__)


class ServiceScaler:
    def __init__(self, api: ApiClient, store: Store, settings: OperatorSettings, probe: PodProbe) -> None:
        self._api, self._store, self._settings, self._probe = api, store, settings, probe
        self._scalers: dict[Key, Scaler] = {}

    async def run(self) -> None:
        while True:
            scaled = {key: found for key in self._store.services() if (found := self._scaled(key))}
            self._scalers = {key: self._scalers.get(key, Scaler()) for key in scaled}
            await asyncio.gather(*(self._look(key, *found) for key, found in scaled.items()))
            await asyncio.sleep(self._settings.autoscale_seconds)

    def _scaled(self, key: Key) -> tuple[Autoscaling, int] | None:
        """Limits and present replicas of a service that is ours to scale."""
        service = self._store.service(key)
        if service is None or service["metadata"].get("deletionTimestamp"):
            return None
        if not self._settings.looks_at(service) or scaled_by_autoscaler(service):
            return None
        try:
            spec = msgspec.convert(service.get("spec", {}), InferenceServiceSpec)
        except msgspec.ValidationError:
            return None
        return None if spec.autoscaling is None else (spec.autoscaling, spec.replicas)

    async def _look(self, key: Key, limits: Autoscaling, replicas: int) -> None:
        loads = await self._probe.in_flight(self._store.pods(key))
        decided = self._scalers[key].decide(
            loads,
            target=limits.target_concurrency,
            minimum=limits.min,
            maximum=limits.max,
            current=replicas,
            now=time.monotonic(),
        )
        if decided == replicas:
            return
        log.info("%s/%s: %d → %d replicas; in flight by pod: %s", *key, replicas, decided, loads)
        try:
            await self._api.scale(SERVICE, *key, decided)
        except (ApiError, aiohttp.ClientError, TimeoutError) as error:
            log.warning("%s/%s: cannot be scaled: %s", *key, error or type(error).__name__)
