"""The work of the operator beside kopf's watches: complete lists, the Lease, workers, the leader's tasks.

    handlers ─▶ Store ─▶ WorkQueue ─▶ workers: Reconciler      only while this replica holds the Lease
    complete lists ─▶

Every replica keeps its store current, so that the next leader begins with a full one. Only the workers of the
leader act.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
from kubernetes.aio.config import ConfigException

from leadline.operator.autoscaling.ranking import Ranker
from leadline.operator.autoscaling.service_scaler import ServiceScaler
from leadline.operator.kube.api import ApiError, KubeApi, NotFound, load_configuration
from leadline.operator.kube.kinds import BY_KIND, CHILDREN, POD, SERVICE, Kind
from leadline.operator.kube.leader import LeaderElection
from leadline.operator.kube.namespaces import TerminatingNamespaces
from leadline.operator.kube.queue import WorkQueue
from leadline.operator.kube.store import Key, Store
from leadline.operator.metrics import MetricsServer, OperatorMetrics
from leadline.operator.names import MANAGED_SELECTOR
from leadline.operator.periodic import repeat
from leadline.operator.planning.served_names import NameIndex
from leadline.operator.probes.pod_events import PodEvents
from leadline.operator.probes.pod_probe import PodProbe
from leadline.operator.probes.start_progress import StartProgress
from leadline.operator.reconcile import Outcome, Reconciler
from leadline.operator.redis_users import RedisUsers
from leadline.operator.settings import OperatorSettings
from leadline.protocol.isvc import ConditionType

__all__ = ["Controller", "OperatorFailure"]

log = logging.getLogger("leadline.operator")

_Task = Callable[[], Coroutine[Any, Any, None]]
_SETTLE_SECONDS = 0.2
"""After a change of a child: further changes, which come in bursts, are handled in the same pass."""


class OperatorFailure(Exception):
    """Why the operator cannot run, in a sentence."""


class Controller:
    """`start`, then `stop`. `stopping` is set when it cannot go on; `failure` is the reason."""

    def __init__(self, settings: OperatorSettings) -> None:
        self.settings = settings
        self.metrics = OperatorMetrics()
        self.store = Store()
        self.queue = WorkQueue()
        self.synced = asyncio.Event()
        """Set once the first complete list is in."""
        self.leading = False
        self.stopping = asyncio.Event()
        self.failure: BaseException | None = None
        self._name_index = NameIndex()
        self._reasons: dict[Key, str] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the tasks; does not wait for the API server."""
        self._task = asyncio.create_task(self._run(), name="controller")
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Stop the tasks; a leader gives up the Lease."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def observe(self, kind: Kind, item: dict[str, Any], *, deleted: bool) -> None:
        """Take in an object from a watch, and queue the service that it belongs to."""
        key = (self.store.remove if deleted else self.store.put)(kind, item)
        if key is not None:
            self.changed(key, kind)

    def changed(self, key: Key, kind: Kind) -> None:
        """The store has another state of a service, or of a child of it."""
        if kind != SERVICE:
            self.queue.add_after(key, _SETTLE_SECONDS)
            return
        service = self.store.service(key)
        ours = service if service is not None and self.settings.selects(service) else None
        for one in (key, *self._name_index.change(key, ours)):
            self.queue.add(one)

    # -- inside ----------------------------------------------------------------------------------------------

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.failure = task.exception()
        self.stopping.set()

    async def _run(self) -> None:
        """Raises OperatorFailure when the API server cannot be used at all."""
        try:
            configuration = await load_configuration()
        except ConfigException as error:
            raise OperatorFailure(
                f"no service account and no usable kubeconfig (set KUBECONFIG): {error}"
            ) from None
        api, probe = KubeApi(configuration, self.metrics.wrote), PodProbe()
        server = MetricsServer(self.metrics, self.settings.port, self.synced, self.queue)
        try:
            try:
                await server.start()
            except OSError as error:
                reason = f"cannot listen on port {self.settings.port}: {error.strerror}"
                raise OperatorFailure(reason) from None
            await self._first_sync(api)
            await self._run_synced(api, probe)
        finally:
            await asyncio.gather(probe.close(), api.close(), server.stop())

    async def _run_synced(self, api: KubeApi, probe: PodProbe) -> None:
        start_progress = StartProgress(self.store, probe, self.queue.add, self.settings.selects)
        pod_events = PodEvents(api, self.store, self.queue.add, self.settings.selects)
        terminating = TerminatingNamespaces(self.store)
        scaler = ServiceScaler(api, self.store, self.settings, probe, self.queue.add, terminating)
        reconciler = Reconciler(
            api,
            self.store,
            self.settings,
            start_progress.reports,
            Ranker(api, probe),
            pod_events.of,
            self._name_index,
            self.queue.add,
            scaler.report,
            terminating,
        )
        users = RedisUsers(self.store, self.settings, lambda up: self.metrics.redis_users.set(float(up)))
        leader_tasks = (scaler.run, start_progress.run, pod_events.run, users.run)
        resync = asyncio.create_task(self._resync_repeatedly(api), name="resync")
        lead = asyncio.create_task(self._lead(api, reconciler, leader_tasks), name="lead")
        try:
            done, _ = await asyncio.wait({resync, lead}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled() and task.exception() is not None:
                    raise OperatorFailure(f"{task.get_name()} ended: {task.exception()!r}")
        finally:
            for task in (resync, lead):
                task.cancel()
            await asyncio.gather(resync, lead, return_exceptions=True)

    # -- complete lists --------------------------------------------------------------------------------------

    async def _first_sync(self, api: KubeApi) -> None:
        delay = 0.5
        while True:
            try:
                await self._resync(api)
            except NotFound:
                raise OperatorFailure(
                    "the cluster does not know InferenceServices: apply manifests/crd.yaml first"
                ) from None
            except ApiError as error:
                if error.is_permanent:
                    raise OperatorFailure(f"the API server refuses: {error}") from None
                log.warning("first list: %s", error)
            except (aiohttp.ClientError, TimeoutError) as error:
                log.warning("first list: %s", str(error) or type(error).__name__)
            else:
                self.synced.set()
                return
            await asyncio.sleep(delay)
            delay = min(delay * 2, 10.0)

    async def _resync_repeatedly(self, api: KubeApi) -> None:
        async def resync() -> None:
            try:
                await self._resync(api)
            except (ApiError, aiohttp.ClientError, TimeoutError) as error:
                log.warning("resync: %s", str(error) or type(error).__name__)
                return
            for key in self.store.services():
                self.queue.add(key)

        await asyncio.sleep(self.settings.resync_seconds)
        await repeat("resync", resync, self.settings.resync_seconds)

    async def _resync(self, api: KubeApi) -> None:
        for kind in (SERVICE, *CHILDREN, POD):
            selector = "" if kind == SERVICE else MANAGED_SELECTOR
            for namespace in self.settings.namespaces or ("",):
                listed, version = await api.list(kind, namespace, selector)
                for item in listed:
                    item.setdefault("kind", kind.kind)
                    item.setdefault("apiVersion", kind.api_version)
                for key in self.store.replace_all(kind, listed, version, namespace):
                    self.changed(key, kind)

    # -- acting ----------------------------------------------------------------------------------------------

    async def _lead(self, api: KubeApi, reconciler: Reconciler, leader_tasks: tuple[_Task, ...]) -> None:
        if not self.settings.leader_elect:
            await self._act(reconciler, leader_tasks)
            return
        identity = f"{os.environ.get('HOSTNAME') or socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        leader = LeaderElection(
            api,
            self.settings.own_namespace,
            self.settings.lease_name,
            identity,
            self.settings.lease_seconds,
            await self._own_deployment(api),
        )
        election = asyncio.create_task(leader.run(), name="election")
        acting: asyncio.Task[None] | None = None
        try:
            while not election.done():
                waiting = asyncio.create_task(leader.leading.wait())
                await asyncio.wait({waiting, election}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if election.done():
                    break
                acting = asyncio.create_task(self._act(reconciler, leader_tasks), name="act")
                losing = asyncio.create_task(leader.lost.wait())
                await asyncio.wait({losing, election, acting}, return_when=asyncio.FIRST_COMPLETED)
                losing.cancel()
                if acting.done():
                    break
                acting.cancel()
                await asyncio.gather(acting, return_exceptions=True)
        finally:
            for task in (acting, election):
                if task is not None:
                    task.cancel()
            await asyncio.gather(*(task for task in (acting, election) if task), return_exceptions=True)
        for task in (acting, election):
            if task is not None and task.done() and not task.cancelled():
                task.result()

    async def _own_deployment(self, api: KubeApi) -> dict[str, Any] | None:
        """The Deployment that has the Lease's name, as the chart's has; None: there is none to be seen."""
        try:
            return await api.find(
                BY_KIND["Deployment"], self.settings.own_namespace, self.settings.lease_name
            )
        except (ApiError, aiohttp.ClientError, TimeoutError):
            return None

    async def _act(self, reconciler: Reconciler, leader_tasks: tuple[_Task, ...]) -> None:
        self.queue.clear()
        for key in self.store.services():
            self.queue.add(key)
        self._set_leading(True)
        try:
            async with asyncio.TaskGroup() as group:
                for task in leader_tasks:
                    group.create_task(task())
                for _ in range(self.settings.workers):
                    group.create_task(self._work(reconciler))
        finally:
            self._set_leading(False)
            # The next leader counts the services; what this replica knew would stand, and its alerts with it.
            self._reasons.clear()
            self.metrics.services.clear()

    def _set_leading(self, leading: bool) -> None:
        self.leading = leading
        self.metrics.leading.set(float(leading))

    async def _work(self, reconciler: Reconciler) -> None:
        while True:
            key = await self.queue.take()
            began = time.monotonic()
            try:
                outcome, again = await reconciler.reconcile(key)
            except (ApiError, aiohttp.ClientError, TimeoutError) as error:
                self._failed(key, error, slowly=isinstance(error, ApiError) and error.is_permanent)
            except Exception as error:
                log.exception("%s/%s: a fault of the operator", *key)
                self._failed(key, error, slowly=False)
            else:
                self.queue.succeeded(key)
                if again is not None:
                    self.queue.add_after(key, again)
                self.metrics.reconciles.labels(outcome).inc()
                self._count(key, outcome)
            finally:
                self.metrics.seconds.observe(time.monotonic() - began)
                self.queue.done(key)

    def _failed(self, key: Key, error: Exception, *, slowly: bool) -> None:
        delay = self.queue.failed(key, slowly=slowly)
        self.metrics.reconciles.labels("failed").inc()
        log.warning("%s/%s: %s; again in %.1f s", *key, str(error) or type(error).__name__, delay)

    def _count(self, key: Key, outcome: str) -> None:
        """Keep the gauge of services by reason."""
        service = self.store.service(key)
        conditions = ((service or {}).get("status") or {}).get("conditions") or []
        reason = (
            ""
            if outcome == Outcome.GONE
            else next((str(one["reason"]) for one in conditions if one["type"] == ConditionType.READY), "")
        )
        before = self._reasons.pop(key, "")
        if before:
            self.metrics.services.labels(before).dec()
        if reason:
            self._reasons[key] = reason
            self.metrics.services.labels(reason).inc()
