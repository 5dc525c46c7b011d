"""The operator's metrics, in a registry of their own, and the server of /metrics and /ready."""

from __future__ import annotations

import asyncio
from collections.abc import Sized

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["MetricsServer", "OperatorMetrics"]


class OperatorMetrics:
    """Labels are few and closed: methods, kinds, outcomes, reasons; never names."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.writes = Counter(
            "leadline_operator_api_writes_total",
            "Writes to the API server by method and kind; constant at steady state, except for kind Lease.",
            ["method", "kind"],
            registry=self.registry,
        )
        self.reconciles = Counter(
            "leadline_operator_reconciles_total",
            "Reconciles by outcome: unchanged, changed, gone, failed.",
            ["outcome"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "leadline_operator_reconcile_seconds",
            "Duration of one reconcile.",
            registry=self.registry,
            buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0),
        )
        self.queued = Gauge(
            "leadline_operator_queue_length", "Services waiting for a reconcile.", registry=self.registry
        )
        self.services = Gauge(
            "leadline_operator_services",
            "Services by the reason of their Ready condition.",
            ["reason"],
            registry=self.registry,
        )
        self.leading = Gauge(
            "leadline_operator_leading", "1 while this replica acts.", registry=self.registry
        )

        self.redis_users = Gauge(
            "leadline_operator_redis_users_connected",
            "1 while the users of services in Redis are maintained; 0 without an administrator's URL.",
            registry=self.registry,
        )

    def wrote(self, method: str, kind: str) -> None:
        self.writes.labels(method, kind).inc()


class MetricsServer:
    """Serves /metrics, and /ready from when `synced` is set."""

    def __init__(self, metrics: OperatorMetrics, port: int, synced: asyncio.Event, queue: Sized) -> None:
        """`port` 0: no server."""
        self._metrics, self._port, self._synced, self._queue = metrics, port, synced, queue
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Raises OSError if the port is in use."""
        if not self._port:
            return
        app = web.Application()
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._serve)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, port=self._port).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _ready(self, _: web.Request) -> web.Response:
        if self._synced.is_set():
            return web.Response(text="ready\n")
        return web.Response(status=503, text="the API server has not been listed yet\n")

    async def _serve(self, _: web.Request) -> web.Response:
        self._metrics.queued.set(len(self._queue))
        body = generate_latest(self._metrics.registry)
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
