"""What a gateway does beside serving: finds pods, reads Redis, loads tokenizers, reloads keys.

Room: gateway. None of it is on a request's path, and none of it ends the process: a service whose tokenizer
cannot be had is matched by pieces of text until it can.
"""

import asyncio
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from leadline.gateway.discovery.discovery import Discovery
from leadline.gateway.index.service_index import ServiceIndex
from leadline.gateway.limits import RateLimits
from leadline.gateway.proxy.attempts import Dispatcher
from leadline.gateway.services import Service
from leadline.gateway.sync.find import find_in
from leadline.gateway.sync.redis_sync import RedisSync
from leadline.gateway.tokens.approximate import ApproximateTokens
from leadline.gateway.tokens.parity import check_parity
from leadline.gateway.tokens.service import TokenService
from leadline.protocol.errors import LeadlineError

if TYPE_CHECKING:
    from leadline.gateway.app import Gateway

__all__ = ["ASSUMED_TTL", "Background"]

logger = logging.getLogger("leadline.gateway")

ASSUMED_TTL = 600.0
"""Seconds for which a pod is believed to hold what was sent to it, where it does not say what it holds."""
_REFRESH = 5.0


class Background:
    """Tasks of one gateway. `start`, then `stop`."""

    def __init__(self, gateway: "Gateway") -> None:
        """Raises ConfigError; connects to nothing yet."""
        config = gateway.config
        self._gateway = gateway
        self._tasks: list[asyncio.Task[None]] = []
        self._syncs: dict[str, RedisSync] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._approximate = {entry.name for entry in config.services if entry.tokenizer == "approximate"}
        self._discovery = Discovery(
            config, gateway.table, gateway.admission.changed, added=self._begin, removed=self._end
        )
        self._limits = RateLimits(config.redis_url, config.limits, workers=config.server.workers)

    async def start(self, dispatcher: Dispatcher) -> RateLimits:
        """Returns once pods of static lists are known; the rest goes on in the background."""
        gateway = self._gateway
        for service in gateway.table:
            self._begin(service)
        await self._discovery.start()
        self._limits.start()
        self._tasks.append(asyncio.create_task(gateway.keys.watch()))
        self._tasks.append(asyncio.create_task(self._refresh(dispatcher)))
        return self._limits

    async def stop(self) -> None:
        tasks = [*self._tasks, *self._loading.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self._loading.clear()
        await self._discovery.close()
        await self._limits.stop()
        for sync in self._syncs.values():
            await sync.stop()
        self._syncs.clear()
        for service in self._gateway.table:
            if service.tokens is not None:
                await asyncio.to_thread(service.tokens.close)

    def _begin(self, service: Service) -> None:
        """Everything for one service."""
        url = self._gateway.config.redis_url
        approximate = service.name in self._approximate
        if approximate or not url:
            # Nobody will say what the pods hold: go by what was sent to them.
            service.index = ServiceIndex(speculative_ttl=ASSUMED_TTL)
        service.tokens = ApproximateTokens()
        if not approximate:
            self._loading[service.name] = asyncio.create_task(self._load_tokens(service))
        if url:
            sync = self._syncs[service.name] = RedisSync(
                service.keys, url, service.index, find_in(service.pods)
            )
            sync.start()

    def _end(self, service: Service) -> None:
        """The service is gone."""
        self._gateway.admission.forget(service)
        sync = self._syncs.pop(service.name, None)
        if sync is not None:
            self._tasks.append(asyncio.create_task(sync.stop()))
        loading = self._loading.pop(service.name, None)
        if loading is not None:
            loading.cancel()

    async def _load_tokens(self, service: Service) -> None:
        """Exchange the approximate tokens for the real ones, as soon as a folder is known."""
        while True:
            model = service.model or _reported_model(service)
            if model:
                break
            await asyncio.sleep(0.5)
        try:
            tokens = await asyncio.to_thread(_load, model)
        except (LeadlineError, OSError, ValueError) as error:
            logger.warning("%s: matching by text, since the tokenizer cannot be had: %s", service.name, error)
            service.index = ServiceIndex(speculative_ttl=ASSUMED_TTL)
            return
        service.tokens = tokens
        logger.info("%s: tokenizer of %s loaded", service.name, model)
        await self._compare(service, tokens)

    async def _compare(self, service: Service, tokens: TokenService) -> None:
        """Whether a pod tokenizes as we do (P21). Once; predicted against actual cached tokens tell later."""
        while True:
            ready = [pod for pod in service.pods.values() if pod.ready and not pod.draining]
            if ready:
                break
            await asyncio.sleep(1.0)
        key = self._gateway.settings.upstream_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with aiohttp.ClientSession() as session:
            report = await check_parity(session, f"http://{ready[0].address}", tokens, headers=headers)
        self._gateway.metrics.parity(service.name, report.agrees)
        log = logger.error if report.agrees is False else logger.info
        log("%s: %s", service.name, report)

    async def _refresh(self, dispatcher: Dispatcher) -> None:
        gateway = self._gateway
        while True:
            await asyncio.sleep(_REFRESH)
            gateway.refresh_metrics()
            dispatcher.forget({pod.address for service in gateway.table for pod in service.pods.values()})
            now = time.monotonic()
            for service in gateway.table:
                service.index.maintain(now)


def _reported_model(service: Service) -> str:
    return next((pod.report.model for pod in service.pods.values() if pod.report is not None), "")


def _load(model: str) -> TokenService:
    if not Path(model).is_dir():
        raise FileNotFoundError(f"there is no folder {model!r}")
    tokens = TokenService.load(model)
    _ = tokens.tokenizer.pieces.longest  # computed over the whole vocabulary on first use: not in a request
    return tokens
