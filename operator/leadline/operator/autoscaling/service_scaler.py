"""Scales all services with `autoscaling` as the autoscaler decides.

Reads the requests in flight from the gateway's replicas, or from the pods where no gateway knows the service
(`demand.py`), and writes `/scale`. Pauses for a service while a HorizontalPodAutoscaler targets it or its
Deployment, and while its replicas are 0 and it does not sleep.

    Ready ── no request for idleSeconds, min 0 ───────▶ asleep: annotation, replicas 0
             ◀── a gateway holds a request ────────────
             ── kubectl scale --replicas=0 ───────────▶ off: stays until it is scaled up

Between two looks at all services the gateways are asked about those that sleep, every half second.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

import aiohttp
import msgspec

from leadline.operator.autoscaling.autoscaler import Scaler
from leadline.operator.autoscaling.demand import (
    Demand,
    GatewayView,
    gateway_counts,
    of_gateway,
    of_pods,
    parse_in_flight,
)
from leadline.operator.autoscaling.gateways import Gateways
from leadline.operator.autoscaling.hpas import Hpas
from leadline.operator.autoscaling.idleness import Idleness
from leadline.operator.kube.api import ApiError, KubeApi
from leadline.operator.kube.kinds import SERVICE
from leadline.operator.kube.namespaces import TerminatingNamespaces
from leadline.operator.kube.store import Key, Store
from leadline.operator.names import child_name
from leadline.operator.periodic import repeat
from leadline.operator.planning.conditions import said_of
from leadline.operator.planning.diagnosis import is_ready
from leadline.operator.planning.observed import ScalingReport, Target, active_pods, is_asleep, was_autoscaled
from leadline.operator.probes.pod_probe import PodProbe
from leadline.operator.settings import OperatorSettings
from leadline.protocol.isvc import ASLEEP_ANNOTATION, GROUP, KIND, ConditionType
from leadline.protocol.isvc_types import Autoscaling, InferenceServiceSpec

__all__ = ["ServiceScaler"]

log = logging.getLogger(__name__)


_WAKE_SECONDS = 0.5
"""Between two questions whether a sleeping service is wanted."""
_MOST_SHARE = 0.05
"""Of the time of a gateway that these questions may take."""
_OFF = "replicas was set to 0, so the service is off: `kubectl scale --replicas=1` starts it"
_STEPS_ASIDE = (
    "a HorizontalPodAutoscaler targets the service or its Deployment (`kubectl get hpa`): autoscaling "
    "resumes when it is gone"
)


def _decision(before: int, after: int, demand: Demand | None, limits: Autoscaling) -> str:
    """A decision of the autoscaler in a line."""
    scaled = f"{before} to {after} replicas"
    if after == 0:
        return f"{scaled}: no request for {limits.idle_seconds} s"
    if demand is None:
        return f"{scaled}: within min {limits.min} and max {limits.max}"
    if demand.low == demand.high:
        known = f"{demand.low:g}"
    else:
        known = (
            f"at least {demand.low:g}" if math.isinf(demand.high) else f"{demand.low:g} to {demand.high:g}"
        )
    return f"{scaled}: {known} requests in flight, targetConcurrency {limits.target_concurrency}"


class ServiceScaler:
    def __init__(
        self,
        api: KubeApi,
        store: Store,
        settings: OperatorSettings,
        probe: PodProbe,
        changed: Callable[[Key], None] = lambda key: None,
        terminating: TerminatingNamespaces | None = None,
    ) -> None:
        """`changed(service)` is called when its report is another."""
        self._changed = changed
        self._terminating = terminating or TerminatingNamespaces(store)
        self._reports: dict[Key, ScalingReport] = {}
        self._api, self._store, self._settings, self._probe = api, store, settings, probe
        self._gateways, self._hpas = Gateways(api, settings, probe), Hpas(api)
        self._scalers: dict[Key, Scaler] = {}
        self._idleness: dict[Key, Idleness] = {}

    def report(self, key: Key) -> ScalingReport | None:
        """The latest report on the scaling of a service; None before the first look at it."""
        return self._reports.get(key)

    async def run(self) -> None:
        # What is left of an earlier time as the leader is no longer so.
        self._reports, self._scalers, self._idleness = {}, {}, {}
        await repeat("autoscaling", self._round)

    async def _round(self) -> None:
        """Look at all services, then wake sleeping ones until the next look is due."""
        await self.look()
        until = time.monotonic() + self._settings.autoscale_seconds
        pause = _WAKE_SECONDS
        while (left := until - time.monotonic()) > 0:
            if not self._marked():
                await asyncio.sleep(left)
                break
            await asyncio.sleep(min(left, pause))
            began = time.monotonic()
            await self.wake()
            pause = max(_WAKE_SECONDS, (time.monotonic() - began) / _MOST_SHARE)

    async def wake(self) -> None:
        """Start pods of those sleeping services for which a gateway holds a request. Those that were started
        by hand lose the mark, so that they can be switched off."""
        marked = self._marked()
        sleeping = {key: found for key, found in marked.items() if found[1] == 0}
        await asyncio.gather(*(self._forget_sleep(key) for key in marked if key not in sleeping))
        views = await self._gateways.views_of_known() if sleeping else []
        await asyncio.gather(*(self._look(key, *found, views) for key, found in sleeping.items()))

    def _marked(self) -> dict[Key, tuple[Autoscaling, int]]:
        """Those services that the last `look` found to be ours to scale, and that have the mark of sleep."""
        return {
            key: found
            for key in self._scalers
            if self._has_mark(key) and (found := self._scaled(key)) is not None
        }

    def _has_mark(self, key: Key) -> bool:
        service = self._store.service(key)
        return service is not None and ASLEEP_ANNOTATION in (service["metadata"].get("annotations") or {})

    async def look(self) -> None:
        """One round over all services that are ours to scale."""
        scaled = {key: found for key in self._store.services() if (found := self._scaled(key))}
        if scaled:
            autoscaled = await self._hpas.targets(self._settings.namespaces or ("",))
            off = {key for key, (_, replicas) in scaled.items() if replicas == 0 and not self._is_asleep(key)}
            elsewhere = {key for key in scaled if self._is_elsewhere(key, autoscaled)}
            self._reports = {key: one for key, one in self._reports.items() if key in scaled}
            for key in scaled:
                if autoscaled is not None or key not in self._reports:
                    self._note(key, _STEPS_ASIDE if key in elsewhere else _OFF if key in off else "")
            if autoscaled is not None:  # requests start no pods of a service that is not ours to scale
                await asyncio.gather(*map(self._forget_sleep, elsewhere))
            scaled = {key: found for key, found in scaled.items() if key not in elsewhere | off}
        self._scalers = {key: self._scalers.get(key, Scaler()) for key in scaled}
        self._idleness = {key: self._idleness.get(key, Idleness()) for key in scaled}
        views = await self._gateways.views() if scaled else []
        await asyncio.gather(*(self._look(key, *found, views) for key, found in scaled.items()))

    def _note(self, key: Key, pauses: str) -> None:
        """Keep why the service is not ours to scale; empty: it is, and its last decision stays."""
        before = self._reports.get(key)
        if before is None or before.active != (not pauses) or (pauses and before.message != pauses):
            self._reports[key] = ScalingReport(not pauses, pauses)
            self._changed(key)

    def _is_asleep(self, key: Key) -> bool:
        return is_asleep(self._store.service(key))

    def _scaled(self, key: Key) -> tuple[Autoscaling, int] | None:
        """Limits and present replicas of a service with `autoscaling` that this operator looks at. None while
        `replicas` are left out: the reconciler is about to write what runs."""
        service = self._store.service(key)
        if service is None or service["metadata"].get("deletionTimestamp"):
            return None
        if not self._settings.selects(service) or self._terminating.hold(service):
            return None
        try:
            spec = msgspec.convert(service.get("spec", {}), InferenceServiceSpec)
        except msgspec.ValidationError:
            return None
        if spec.autoscaling is None or spec.replicas is None:
            return None
        return spec.autoscaling, spec.replicas

    def _is_elsewhere(self, key: Key, autoscaled: frozenset[Target] | None) -> bool:
        """Whether an autoscaler scales the service. Where the API server does not tell which there are, one
        that has scaled it is taken to be there still."""
        if autoscaled is None:
            return was_autoscaled(self._store.service(key))
        namespace, name = key
        places = (GROUP, KIND, namespace, name), ("apps", "Deployment", namespace, child_name(name))
        return any(Target(*place) in autoscaled for place in places)

    async def _look(
        self, key: Key, limits: Autoscaling, replicas: int, views: list[GatewayView | None]
    ) -> None:
        name = "/".join(key)
        now = time.monotonic()
        has_gateway = gateway_counts(views, name)
        if has_gateway:
            demand = of_gateway(views, name)
        else:
            demand = of_pods(await self._loads(key), limits.target_concurrency)
        if replicas:
            await self._forget_sleep(key)
        # During a rollout old pods may serve where new ones cannot: they would not come back.
        ready = said_of(self._store.service(key) or {}, ConditionType.READY).get("status") == "True"
        idle = self._idleness[key].seconds(demand if ready and has_gateway else None, now)
        if replicas == 0 and limits.min == 0 and not (demand is not None and demand.low > 0):
            return  # it sleeps on
        decided = self._scalers[key].decide(
            demand,
            target=limits.target_concurrency,
            minimum=max(1, limits.min),
            maximum=limits.max,
            current=replicas,
            now=now,
        )
        if limits.min == 0 and replicas and idle >= limits.idle_seconds:
            if any(await self._loads(key)):  # from clients that do not ask through the gateway
                self._idleness[key] = Idleness()
            else:
                decided = 0
        if decided == replicas or self._scaled(key) != (limits, replicas):
            return  # the next look decides on what has changed meanwhile
        if replicas == 0 and not self._has_mark(key):
            return  # switched off meanwhile
        log.info("%s: %d → %d replicas; in flight: %s", name, replicas, decided, demand)
        before = self._reports.get(key)
        # Before the request: the watch brings the new number as soon as the server has it.
        self._reports[key] = ScalingReport(True, _decision(replicas, decided, demand, limits))
        try:
            await self._write(key, decided)
            self._changed(key)
        except (ApiError, aiohttp.ClientError, TimeoutError) as error:
            self._reports[key] = before or ScalingReport(True)
            log.warning("%s/%s: cannot be scaled: %s", *key, str(error) or type(error).__name__)

    async def _write(self, key: Key, decided: int) -> None:
        """Write the number of replicas. The mark of a service that sleeps goes first, so that it never seems
        to be off."""
        service = self._store.service(key)
        if not decided and service is not None:
            await self._api.annotate(SERVICE, service["metadata"], {ASLEEP_ANNOTATION: "true"})
        await self._api.scale(SERVICE, *key, decided)
        self._idleness[key] = Idleness()
        if decided:
            await self._forget_sleep(key, woken=True)

    async def _forget_sleep(self, key: Key, *, woken: bool = False) -> None:
        """Remove the mark of a service that sleeps: replicas 0 mean from now on that it is off. Unless it
        was `woken` just now, the store must be up to date: the service may have fallen asleep since."""
        service = self._store.service(key)
        if service is None or not self._has_mark(key):
            return
        metadata = service["metadata"]
        version = "" if woken else metadata["resourceVersion"]
        try:
            await self._api.annotate(SERVICE, metadata, {ASLEEP_ANNOTATION: None}, version)
        except (ApiError, aiohttp.ClientError, TimeoutError) as error:
            log.info("%s/%s: still marked as asleep: %s", *key, str(error) or type(error).__name__)

    async def _loads(self, key: Key) -> list[float | None]:
        """Requests that each ready pod holds; None for one that does not say."""
        ready = [pod for pod in active_pods(self._store.pods(key)) if is_ready(pod)]
        texts = await asyncio.gather(*(self._probe.metrics(pod["status"]["podIP"]) for pod in ready))
        loads: list[float | None] = []
        for text in texts:
            try:
                loads.append(None if text is None else parse_in_flight(text))
            except ValueError:
                loads.append(None)
        return loads
