"""The background tasks of a gateway: find pods, read Redis, load tokenizers, reload keys.

No request waits for them, and none of them ends the process.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import aiohttp

from leadline.gateway.access.limits import RateLimits
from leadline.gateway.admission.admission import Admission
from leadline.gateway.config.settings import GatewayConfig
from leadline.gateway.discovery.discovery import Discovery
from leadline.gateway.metrics.metrics import GatewayMetrics
from leadline.gateway.proxy.dispatcher import Dispatcher
from leadline.gateway.services import Service, ServiceTable
from leadline.gateway.sync.counts import SyncMetric
from leadline.gateway.sync.heartbeats import find_in
from leadline.gateway.sync.redis_sync import RedisSync
from leadline.gateway.tokenizers.bundles import TokenPool
from leadline.gateway.tokenizers.loader import TokenizerLoader
from leadline.gateway.tokens.approximate import ApproximateTokens
from leadline.gateway.tokens.mode import ASSUMED_TTL, ModeMetric, Reason, TokenMode
from leadline.gateway.tokens.parity import ParityReport

__all__ = ["Background"]

logger = logging.getLogger("leadline.gateway")

_REFRESH = 5.0


class Background:
    """Tasks of one gateway. `start`, then `stop`."""

    def __init__(
        self,
        config: GatewayConfig,
        table: ServiceTable,
        admission: Admission,
        metrics: GatewayMetrics,
        *,
        refresh: Callable[[], None],
    ) -> None:
        """`refresh`: brings gauges up to date, every few seconds. Raises ConfigError; connects to nothing
        yet."""
        self._redis_url = config.redis_url
        self._table, self._admission, self._metrics = table, admission, metrics
        self._refresh_metrics = refresh
        self._tasks: list[asyncio.Task[None]] = []
        self._syncs: dict[str, RedisSync] = {}
        self._loaders: dict[str, asyncio.Task[None]] = {}
        self._pool = TokenPool()
        self._session: aiohttp.ClientSession | None = None
        """To pods."""
        self._modes = ModeMetric(metrics.registry)
        self._reading = SyncMetric(metrics.registry)
        self._approximate = {entry.name for entry in config.services if entry.tokenizer == "approximate"}
        self._discovery = Discovery(config, table, admission.changed, added=self._begin, removed=self._end)
        self._limits = RateLimits(config.redis_url, config.limits, workers=config.server.workers)

    async def start(
        self, dispatcher: Dispatcher, watches: Sequence[Callable[[], Coroutine[Any, Any, None]]]
    ) -> RateLimits:
        """Start everything, `watches` included. Returns once pods of static lists are known; the rest goes on
        in the background."""
        self._session = aiohttp.ClientSession()
        for service in self._table:
            self._begin(service)
        await self._discovery.start()
        self._limits.start()
        self._tasks += [asyncio.create_task(watch()) for watch in watches]
        self._tasks.append(asyncio.create_task(self._refresh(dispatcher)))
        return self._limits

    async def stop(self) -> None:
        tasks = [*self._tasks, *self._loaders.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self._loaders.clear()
        if self._session is not None:
            await self._session.close()
        await self._discovery.close()
        await self._limits.stop()
        for sync in self._syncs.values():
            await sync.stop()
        self._syncs.clear()
        for service in self._table:
            if service.tokens is not None:
                await asyncio.to_thread(service.tokens.close)

    def _begin(self, service: Service) -> None:
        """Everything for one service."""
        url = self._redis_url
        service.tokens = ApproximateTokens()
        service.index.guess_for(ASSUMED_TTL)
        if service.name in self._approximate:
            service.token_mode = TokenMode(Reason.CONFIGURED)
        else:
            assert self._session is not None
            key = service.api_key
            loader = TokenizerLoader(
                service,
                self._pool,
                self._session,
                events=bool(url),
                headers={"Authorization": f"Bearer {key}"} if key else {},
                changed=self._show_mode,
                compared=self._show_parity,
            )
            self._loaders[service.name] = asyncio.create_task(loader.run(), name=f"tokens {service.name}")
        self._show_mode(service)
        if url:
            sync = self._syncs[service.name] = RedisSync(
                service.keys, url, service.index, find_in(service.pods)
            )
            sync.start()
            self._reading.show(service.name, sync.counts)

    def _end(self, service: Service) -> None:
        """The service is gone."""
        self._admission.forget(service)
        sync = self._syncs.pop(service.name, None)
        if sync is not None:
            self._tasks.append(asyncio.create_task(sync.stop()))
            self._reading.forget(service.name)
        loader = self._loaders.pop(service.name, None)
        if loader is not None:
            loader.cancel()
        self._modes.forget(service.name)

    def _show_mode(self, service: Service) -> None:
        self._modes.show(service.name, service.token_mode)

    def _show_parity(self, service: Service, report: ParityReport) -> None:
        """Whether a pod tokenizes as we do (P21); predicted against actual cached tokens tell later."""
        self._metrics.parity(service.name, report.agrees)
        log = logger.error if report.agrees is False else logger.info
        log("%s: %s", service.name, report)

    async def _refresh(self, dispatcher: Dispatcher) -> None:
        while True:
            await asyncio.sleep(_REFRESH)
            self._refresh_metrics()
            for name, sync in self._syncs.items():
                self._reading.show(name, sync.counts)
            dispatcher.forget({pod.address for service in self._table for pod in service.pods.values()})
            now = time.monotonic()
            for service in self._table:
                service.index.maintain(now)
