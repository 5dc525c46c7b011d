"""One pass over one InferenceService: read the store, `plan`, and send the requests that carry the plan out.

Level-triggered: neither the cause of a pass nor what an earlier pass left half done matters (P7). Before it
writes anything, a pass reads the service from the API server once, so that it never acts for a service that
is gone or has changed.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from leadline.operator.autoscaling.hpas import Hpas
from leadline.operator.autoscaling.ranking import Ranker
from leadline.operator.kube.api import ApiError, Conflict, KubeApi, NamespaceTerminating, NotFound
from leadline.operator.kube.drift import AppliedFields
from leadline.operator.kube.kinds import BY_KIND, EVENT, SERVICE
from leadline.operator.kube.namespaces import LimitRanges, TerminatingNamespaces
from leadline.operator.kube.store import Key, Store, service_of
from leadline.operator.names import HASH_ANNOTATION, child_name
from leadline.operator.objects.context import digest
from leadline.operator.planning.diagnosis import lacks_secret
from leadline.operator.planning.observed import (
    Observed,
    ScalingReport,
    StartReport,
    Target,
    owned_by_autoscaler,
    owner_of,
    was_autoscaled,
)
from leadline.operator.planning.plan import Event, Plan, plan
from leadline.operator.planning.served_names import NameIndex, Names, decide_names
from leadline.operator.settings import OperatorSettings
from leadline.protocol.isvc import API_VERSION, KIND

__all__ = ["Outcome", "Reconciler"]

log = logging.getLogger(__name__)

Object = dict[str, Any]
_REFUSAL_SECONDS = 60.0
_LATE = {"Deployment", "Service", "PodDisruptionBudget"}
"""Applied after what pods need to start and what protects them."""


class Outcome:
    """The result of a pass."""

    UNCHANGED, CHANGED, GONE = "unchanged", "changed", "gone"


@dataclass(slots=True, frozen=True)
class _Refusal:
    """The API server found an object invalid or forbidden. The same request would fail again. It is repeated
    when the desired objects change or after a minute (a quota or a policy may have changed); the status shows
    the message."""

    message: str
    desired: str
    """Digest of the desired objects."""
    since: float

    def is_over(self, wanted: list[Object]) -> bool:
        return digest(wanted) != self.desired or time.monotonic() - self.since >= _REFUSAL_SECONDS


class Reconciler:
    def __init__(
        self,
        api: KubeApi,
        store: Store,
        settings: OperatorSettings,
        reports: Callable[[list[Object]], dict[str, StartReport]],
        ranker: Ranker,
        pod_events: Callable[[Key], dict[str, str]] = lambda key: {},
        name_index: NameIndex | None = None,
        affects: Callable[[Key], None] = lambda key: None,
        scaling: Callable[[Key], ScalingReport | None] = lambda key: None,
        terminating: TerminatingNamespaces | None = None,
    ) -> None:
        """`reports(pods)`: progress of those of them that are starting, by uid. `pod_events(key)`: the newest
        warning about a service's pods that cannot start, by uid. `name_index`: the names of all services in
        the store. `affects(key)` is called for services whose names may change after a change of another.
        `scaling(key)`: what the autoscaler does for a service."""
        self._name_index, self._affects = name_index or NameIndex(), affects
        self._api, self._store, self._settings = api, store, settings
        self._reports, self._pod_events, self._scaling = reports, pod_events, scaling
        self._terminating = terminating or TerminatingNamespaces(store)
        self._ranker, self._hpas, self._limit_ranges = ranker, Hpas(api), LimitRanges(api)
        self._limited: dict[str, frozenset[str]] = {}
        self._autoscaled: dict[Key, frozenset[Target] | None] = {}
        """Of services in a pass."""
        self._applied: defaultdict[Key, AppliedFields] = defaultdict(AppliedFields)
        self._refusals: dict[Key, _Refusal] = {}

    async def reconcile(self, key: Key) -> tuple[str, float | None]:
        """Returns the outcome, and the seconds after which to repeat the pass although nothing has changed.
        Raises ApiError and aiohttp.ClientError for requests that failed; earlier requests stay done."""
        service = self._store.service(key)
        if (
            service is None
            or service["metadata"].get("deletionTimestamp")
            or not self._settings.selects(service)
        ):
            self._refusals.pop(key, None)
            self._terminating.forget(key[0])
            self._applied.pop(key, None)
            return Outcome.GONE, None
        if self._terminating.hold(service):
            return Outcome.GONE, None
        self._limited[key[0]] = await self._limit_ranges.of(key[0])
        try:
            if was_autoscaled(self._deployment(key)):
                self._autoscaled[key] = await self._hpas.targets((key[0],))
            return await self._reconcile(key, service)
        except NamespaceTerminating:
            self._terminating.add(key[0])
            return Outcome.GONE, None
        finally:
            self._autoscaled.pop(key, None)

    # -- inside ----------------------------------------------------------------------------------------------

    async def _reconcile(self, key: Key, service: Object) -> tuple[str, float | None]:
        made = self._plan(key, service)
        if not self._writes(key, service, made):
            return Outcome.UNCHANGED, self._again(key)
        try:
            service = await self._api.get(SERVICE, *key)
        except NotFound:
            self._store.remove(SERVICE, service)
            for other in self._name_index.change(key, None):
                self._affects(other)
            return Outcome.GONE, None
        if service["metadata"].get("deletionTimestamp"):
            return Outcome.GONE, None
        self._put(key, service)
        made = self._plan(key, service)
        foreign = await self._foreign(key, made)
        if foreign:
            made = self._plan(key, service, foreign)
            await self._report(service, made)
            return Outcome.UNCHANGED, _REFUSAL_SECONDS
        if self._has_left_overs(key, made):
            return Outcome.UNCHANGED, 1.0
        if made.replicas is not None:
            try:
                service = await self._fill_replicas(key, service, made.replicas)
            except (NotFound, Conflict):
                return Outcome.UNCHANGED, 1.0  # it is gone, or has just been scaled
            made = self._plan(key, service)
        await self._carry_out(key, made)
        # The children have changed, so the status may have, too.
        made = self._plan(key, service)
        await self._report(service, made)
        return Outcome.CHANGED, self._again(key)

    async def _fill_replicas(self, key: Key, service: Object, replicas: int) -> Object:
        """Write the number that `replicas`, which the spec leaves out, stands for; the service afterwards. It
        goes through /scale, which records no field manager for a field that was not there: a later
        server-side apply that does name `replicas` meets no conflict."""
        await self._api.scale(SERVICE, *key, replicas, service["metadata"]["resourceVersion"])
        filled = await self._api.get(SERVICE, *key)
        self._store.put(SERVICE, filled)
        return filled

    def _deployment(self, key: Key) -> Object | None:
        return self._store.get(key, BY_KIND["Deployment"], child_name(key[1]))

    def _again(self, key: Key) -> float | None:
        """No watch reports that an autoscaler has gone."""
        if owned_by_autoscaler(self._deployment(key), self._autoscaled.get(key)):
            return self._settings.autoscale_seconds
        return _REFUSAL_SECONDS if key in self._refusals else None

    async def _foreign(self, key: Key, made: Plan) -> dict[tuple[str, str], Object]:
        """Objects in the way of those that are about to be created. The store holds only what carries our
        labels; an apply would take over what does not."""
        children = self._store.children(key)
        places = [(BY_KIND[one["kind"]], one["metadata"]["name"]) for one in self._to_apply(key, made)]
        unseen = [(kind, name) for kind, name in places if (kind.kind, name) not in children]
        # Secrets may not be read.
        ways = [self._api.find_by_patch if kind.kind == "Secret" else self._api.find for kind, _ in unseen]
        items = await asyncio.gather(
            *(way(kind, key[0], name) for way, (kind, name) in zip(ways, unseen, strict=True))
        )
        found: dict[tuple[str, str], Object] = {}
        for (kind, name), item in zip(unseen, items, strict=True):
            if item is None:
                continue
            if service_of(kind, item) == key:
                if kind.kind != "Secret":
                    self._store.put(kind, item)
            else:
                found[kind.kind, name] = item
        return found

    def _has_left_overs(self, key: Key, made: Plan) -> bool:
        """Whether children of a deleted service of the same name are still there: Kubernetes collects them
        within seconds, and an apply would only be told that they have a controller."""
        children = self._store.children(key)
        places = [(one["kind"], one["metadata"]["name"]) for one in made.desired or []]
        owners = [owner_of(children[place]) for place in places if place in children]
        service = self._store.service(key)
        uid = service["metadata"]["uid"] if service is not None else ""
        return any(owner not in ("", uid) for owner in owners)

    def _plan(
        self,
        key: Key,
        service: Object,
        foreign: dict[tuple[str, str], Object] | None = None,
    ) -> Plan:
        return plan(
            Observed(
                service,
                datetime.now(UTC),
                self._store.children(key) | (foreign or {}),
                pods := self._store.pods(key),
                self._reports(pods),
                self._autoscaled.get(key),
                self._pod_events(key),
                self._names(key, service),
                self._scaling(key),
                self._limited.get(key[0], frozenset()),
                self._refusals[key].message if key in self._refusals else "",
            ),
            self._settings,
        )

    def _names(self, key: Key, service: Object) -> Names:
        rivals = map(self._store.service, self._name_index.rivals(key, service))
        return decide_names(service, [one for one in rivals if one], self._settings.name_prefixes)

    def _put(self, key: Key, service: Object) -> None:
        """Store the API server's answer for the service. The watch may bring the same state again, which the
        store then ignores."""
        self._store.put(SERVICE, service)
        known = self._store.service(key)
        ours = known if known is not None and self._settings.selects(known) else None
        for other in self._name_index.change(key, ours):
            self._affects(other)

    def _to_apply(self, key: Key, made: Plan) -> list[Object]:
        """Children to be applied. A Secret is not read back: it goes along whenever the Deployment, which
        carries its digest, is applied, and when a pod says that it is gone."""
        children = self._store.children(key)
        wanted = made.desired or []
        chosen = [
            one
            for one in wanted
            if one["kind"] != "Secret"
            and self._applied[key].must_apply(one, children.get((one["kind"], one["metadata"]["name"])))
        ]
        refusal = self._refusals.get(key)
        if refusal is not None and not refusal.is_over(wanted):
            return []
        deploys, pod_events = (
            any(one["kind"] == "Deployment" for one in chosen),
            self._pod_events(key).values(),
        )
        return [
            one
            for one in wanted
            if one in chosen
            or (one["kind"] == "Secret" and (deploys or lacks_secret(pod_events, one["metadata"]["name"])))
        ]

    def _writes(self, key: Key, service: Object, made: Plan) -> bool:
        return bool(
            self._to_apply(key, made)
            or made.delete
            or made.replicas is not None
            or made.status != (service.get("status") or {})
        )

    async def _carry_out(self, key: Key, made: Plan) -> None:
        """What pods need goes first, then the rest, all of it at once: a service is a few round trips."""
        wanted = self._to_apply(key, made)
        late = [one for one in wanted if one["kind"] in _LATE]
        for stage in ([one for one in wanted if one not in late], late):
            if not await self._apply(key, made, stage):
                return
        if not self._to_apply(key, made):
            self._refusals.pop(key, None)
        for child in made.delete:
            kind = BY_KIND[child["kind"]]
            await self._api.delete(child, kind)
            self._applied[key].forget(child)
            # Until the watch says what became of it; with a finalizer, which claims have, it stays for a
            # while.
            child["metadata"]["deletionTimestamp"] = "requested"

    async def _apply(self, key: Key, made: Plan, stage: list[Object]) -> bool:
        """Apply some objects. False if one was refused for good. Raises the first error of another kind,
        after what succeeded has been taken in."""
        children = self._store.children(key)
        for wanted in stage:
            if wanted["kind"] == "Deployment":
                await self._ranker.before(wanted, children, self._store.pods(key))
            elif wanted["kind"] == "PodDisruptionBudget":
                await self._drop_min_available(wanted, children)
        answers = await asyncio.gather(
            *(self._api.apply(wanted, BY_KIND[wanted["kind"]]) for wanted in stage), return_exceptions=True
        )
        errors = []
        for wanted, answer in zip(stage, answers, strict=True):
            if isinstance(answer, BaseException):
                errors.append(answer)
            elif HASH_ANNOTATION in wanted["metadata"].get("annotations", {}):
                self._applied[key].remember(wanted, answer)
                self._store.put(BY_KIND[wanted["kind"]], answer)
        for error in errors:
            if not (isinstance(error, ApiError) and error.is_permanent):
                raise error
        if errors:
            self._refusals[key] = _Refusal(str(errors[0]), digest(made.desired), time.monotonic())
        return not errors

    async def _drop_min_available(self, wanted: Object, children: dict[tuple[str, str], Object]) -> None:
        """Remove `minAvailable`, which an administrator may have set to let a drain pass: with it, the API
        server refuses our `maxUnavailable`."""
        kind = wanted["kind"]
        live = children.get((kind, wanted["metadata"]["name"]))
        if live is not None and live["spec"].get("minAvailable") is not None:
            fields = {"minAvailable": None, "maxUnavailable": wanted["spec"]["maxUnavailable"]}
            await self._api.set_spec(BY_KIND[kind], live["metadata"], fields)

    async def _report(self, service: Object, made: Plan) -> None:
        if made.status == (service.get("status") or {}):
            return
        metadata = service["metadata"]
        wanted = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            # The uid makes the server refuse if the service has been replaced by one of the same name.
            "metadata": {
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "status": made.status,
        }
        try:
            answer = await self._api.apply(wanted, SERVICE, "status")
        except (NotFound, Conflict):
            return  # it is gone or replaced: the watch reports that and queues it again
        self._put((metadata["namespace"], metadata["name"]), answer)
        for event in made.events:
            await self._emit(service, event)

    async def _emit(self, service: Object, event: Event) -> None:
        metadata = service["metadata"]
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        log.info("%s/%s: %s: %s", metadata["namespace"], metadata["name"], event.reason, event.message)
        await self._api.create(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {
                    "name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}",
                    "namespace": metadata["namespace"],
                },
                "involvedObject": {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": metadata["name"],
                    "namespace": metadata["namespace"],
                    "uid": metadata["uid"],
                },
                "type": "Warning" if event.warning else "Normal",
                "reason": event.reason,
                "message": event.message[:1024],
                "source": {"component": "leadline-operator"},
                "reportingComponent": "leadline-operator",
                "firstTimestamp": now,
                "lastTimestamp": now,
                "count": 1,
            },
            EVENT,
        )
