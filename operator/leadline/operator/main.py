"""The operator process: watches, workers, resync, leader election, and an HTTP port for probes and metrics.

    kopf ──▶ Store ──▶ WorkQueue ──▶ workers: Reconciler      only while the Lease is ours
    resync ──▶

Every replica watches, so that the next leader begins with a warm store; only the leader's workers act.
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
import kopf
from aiohttp import web
from kubernetes.aio.config import ConfigException
from prometheus_client import generate_latest

from leadline.operator.autoscaling.ranking import Ranker
from leadline.operator.autoscaling.service_scaler import ServiceScaler
from leadline.operator.kube.api import ApiError, KubeApi, NotFound, load_configuration
from leadline.operator.kube.kinds import BY_KIND, CHILDREN, POD, SERVICE, Kind
from leadline.operator.kube.leader import LeaderElection
from leadline.operator.kube.queue import WorkQueue
from leadline.operator.kube.store import Key, Store
from leadline.operator.kube.terminating_namespaces import TerminatingNamespaces
from leadline.operator.metrics import OperatorMetrics
from leadline.operator.names import MANAGED_SELECTOR
from leadline.operator.planning.served_names import NameIndex
from leadline.operator.probes.pod_events import PodEvents
from leadline.operator.probes.pod_probe import PodProbe
from leadline.operator.probes.start_progress import StartProgress
from leadline.operator.reconcile import Outcome, Reconciler
from leadline.operator.redis_users import RedisUsers
from leadline.operator.settings import OperatorSettings
from leadline.operator.shell import kopf_settings, watching_registry
from leadline.protocol.isvc import ConditionType

__all__ = ["Operator", "run"]

log = logging.getLogger("leadline.operator")

_Beside = Callable[[], Coroutine[Any, Any, None]]
"""What runs beside the workers while this replica acts."""
_SETTLE_SECONDS = 0.2
"""After a change of a child: its next ones, which come in bursts, are looked at together."""


class OperatorFailure(Exception):
    """Why the operator cannot run, in a sentence."""


def run(settings: OperatorSettings) -> int:
    """Run until SIGTERM; the exit code."""
    logging.getLogger("kopf").setLevel(logging.WARNING)
    try:
        asyncio.run(Operator(settings).run())
    except OperatorFailure as failure:
        log.error("%s", failure)
        return 1
    return 0


class Operator:
    def __init__(self, settings: OperatorSettings) -> None:
        self.settings = settings
        self.metrics = OperatorMetrics()
        self.store = Store()
        self.queue = WorkQueue()
        self._name_index = NameIndex()
        self._kopf = kopf_settings()
        self._leader: LeaderElection | None = None
        self._reasons: dict[Key, str] = {}
        self._synced = asyncio.Event()

    async def run(self) -> None:
        """Raises OperatorFailure when the API server cannot be used at all. Ends when a signal comes."""
        try:
            configuration = await load_configuration()
        except ConfigException as error:
            raise OperatorFailure(f"no service account and no usable kubeconfig (set KUBECONFIG): {error}") from None
        api, probe = KubeApi(configuration, self.metrics.wrote), PodProbe()
        tasks: list[asyncio.Task[None]] = []
        try:
            server = await self._serve()
            await self._first_sync(api)
            starts = StartProgress(self.store, probe, self.queue.add, self.settings.selects)
            pod_events = PodEvents(api, self.store, self.queue.add, self.settings.selects)
            terminating = TerminatingNamespaces(self.store)
            scaler = ServiceScaler(api, self.store, self.settings, probe, self.queue.add, terminating)
            reconciler = Reconciler(
                api,
                self.store,
                self.settings,
                starts.reports,
                Ranker(api, probe),
                pod_events.of,
                self._name_index,
                self.queue.add,
                scaler.report,
                terminating,
            )
            users = RedisUsers(self.store, self.settings, lambda up: self.metrics.redis_users.set(float(up)))
            tasks = [
                asyncio.create_task(self._resync_for_ever(api), name="resync"),
                asyncio.create_task(
                    self._lead(api, reconciler, (scaler.run, starts.run, pod_events.run, users.run)),
                    name="lead",
                ),
            ]
            watching = asyncio.create_task(self._watch(), name="watch")
            done, _ = await asyncio.wait({*tasks, watching}, return_when=asyncio.FIRST_COMPLETED)
            watching.cancel()
            for task in done:
                if not task.cancelled() and task.exception() is not None:
                    raise OperatorFailure(f"{task.get_name()} ended: {task.exception()!r}")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(probe.close(), api.close())
        if server is not None:
            await server.cleanup()

    # -- watching --------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Returns at SIGTERM and SIGINT, which kopf handles."""
        namespaces = self.settings.namespaces
        await kopf.operator(
            registry=watching_registry(self.store, self.changed),
            settings=self._kopf,
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
        )

    def changed(self, key: Key, kind: Kind) -> None:
        """The store has another state of a service, or of a child of it."""
        if kind != SERVICE:
            self.queue.add_after(key, _SETTLE_SECONDS)
            return
        service = self.store.service(key)
        ours = service if service is not None and self.settings.selects(service) else None
        for one in (key, *self._name_index.change(key, ours)):
            self.queue.add(one)

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
                self._synced.set()
                return
            await asyncio.sleep(delay)
            delay = min(delay * 2, 10.0)

    async def _resync_for_ever(self, api: KubeApi) -> None:
        while True:
            await asyncio.sleep(self.settings.resync_seconds)
            try:
                await self._resync(api)
            except (ApiError, aiohttp.ClientError, TimeoutError) as error:
                log.warning("resync: %s", str(error) or type(error).__name__)
                continue
            for key in self.store.services():
                self.queue.add(key)

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

    async def _lead(self, api: KubeApi, reconciler: Reconciler, beside: tuple[_Beside, ...]) -> None:
        if not self.settings.leader_elect:
            await self._act(reconciler, beside)
            return
        identity = f"{os.environ.get('HOSTNAME') or socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        leader = self._leader = LeaderElection(
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
                acting = asyncio.create_task(self._act(reconciler, beside), name="act")
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

    async def _act(self, reconciler: Reconciler, beside: tuple[_Beside, ...]) -> None:
        self.queue.clear()
        for key in self.store.services():
            self.queue.add(key)
        self.metrics.leading.set(1)
        try:
            async with asyncio.TaskGroup() as group:
                for task in beside:
                    group.create_task(task())
                for _ in range(self.settings.workers):
                    group.create_task(self._work(reconciler))
        finally:
            self.metrics.leading.set(0)

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

    # -- being looked at -------------------------------------------------------------------------------------

    async def _serve(self) -> web.AppRunner | None:
        if not self.settings.port:
            return None
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, port=self.settings.port).start()
        except OSError as error:
            raise OperatorFailure(f"cannot listen on port {self.settings.port}: {error.strerror}") from None
        return runner

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, _: web.Request) -> web.Response:
        if self._synced.is_set():
            return web.Response(text="ready\n")
        return web.Response(status=503, text="the API server has not been listed yet\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        self.metrics.queued.set(len(self.queue))
        body = generate_latest(self.metrics.registry)
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
