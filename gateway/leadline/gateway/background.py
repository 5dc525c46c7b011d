"""What a gateway does beside serving: finds pods, reads Redis, loads tokenizers, reloads keys.

Room: gateway. None of it is on a request's path, and none of it ends the process: a service whose tokenizer
cannot be had is matched by pieces of text until it can.
"""

import asyncio
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from leadline.gateway.index.service_index import ServiceIndex
from leadline.gateway.pods import Pod
from leadline.gateway.proxy.attempts import Dispatcher
from leadline.gateway.services import Service
from leadline.gateway.sync.find import find_in
from leadline.gateway.sync.redis_sync import RedisSync
from leadline.gateway.tokens.approximate import ApproximateTokens
from leadline.gateway.tokens.service import TokenService
from leadline.protocol.errors import LeadlineError

if TYPE_CHECKING:
    from leadline.gateway.limits import RateLimits

    from leadline.gateway.app import Gateway

__all__ = ["APPROXIMATE_TTL", "Background"]

logger = logging.getLogger("leadline.gateway")

APPROXIMATE_TTL = 600.0
"""Seconds for which a pod is believed to hold what was sent to it, where it does not say what it holds."""
_REFRESH = 5.0


class Background:
    """Tasks of one gateway. `start`, then `stop`."""

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway
        self._tasks: list[asyncio.Task[None]] = []
        self._syncs: dict[str, RedisSync] = {}

    async def start(self, dispatcher: Dispatcher) -> "RateLimits | None":
        """Returns once pods of static lists are known; the rest goes on in the background."""
        gateway = self._gateway
        config = gateway.config
        for entry in config.services:
            service = gateway.table.get(entry.name)
            assert service is not None
            for pod in entry.pods:
                name = pod.id or pod.address
                service.pods[name] = Pod(id=name, address=pod.address, service=service.name)
        approximate = {entry.name for entry in config.services if entry.tokenizer == "approximate"}
        for service in gateway.table:
            self._begin(service, approximate=service.name in approximate)
        self._tasks.append(asyncio.create_task(gateway.keys.watch()))
        self._tasks.append(asyncio.create_task(self._refresh(dispatcher)))
        return None

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for sync in self._syncs.values():
            await sync.stop()
        self._syncs.clear()
        for service in self._gateway.table:
            if service.tokens is not None:
                await asyncio.to_thread(service.tokens.close)

    def _begin(self, service: Service, *, approximate: bool) -> None:
        """Everything for one service."""
        url = self._gateway.config.redis_url
        if approximate or not url:
            # Nobody will say what the pods hold: go by what was sent to them.
            service.index = ServiceIndex(speculative_ttl=APPROXIMATE_TTL)
        service.tokens = ApproximateTokens()
        if not approximate:
            self._tasks.append(asyncio.create_task(self._load_tokens(service)))
        if url:
            sync = self._syncs[service.name] = RedisSync(
                service.keys, url, service.index, find_in(service.pods)
            )
            sync.start()

    async def _load_tokens(self, service: Service) -> None:
        """Exchange the approximate tokens for the real ones, as soon as a folder is known."""
        while True:
            model = service.model or next(
                (pod.report.model for pod in service.pods.values() if pod.report is not None), ""
            )
            if model:
                break
            await asyncio.sleep(0.5)
        try:
            tokens = await asyncio.to_thread(_load, model)
        except (LeadlineError, OSError, ValueError) as error:
            logger.warning("%s: matching by text, since the tokenizer cannot be had: %s", service.name, error)
            return
        service.tokens = tokens
        logger.info("%s: tokenizer of %s loaded", service.name, model)

    async def _refresh(self, dispatcher: Dispatcher) -> None:
        gateway = self._gateway
        while True:
            await asyncio.sleep(_REFRESH)
            gateway.refresh_metrics()
            dispatcher.forget({pod.address for service in gateway.table for pod in service.pods.values()})
            now = time.monotonic()
            for service in gateway.table:
                service.index.maintain(now)


def _load(model: str) -> TokenService:
    path = Path(model)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {model!r}")
    tokens = TokenService.load(path)
    _ = tokens.tokenizer.pieces.longest
    return tokens
