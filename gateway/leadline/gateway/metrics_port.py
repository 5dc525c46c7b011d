"""`GET /metrics` on a port of its own, which is not published with the API: it names services and their
traffic."""

import asyncio
import socket
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

if TYPE_CHECKING:
    from leadline.gateway.app import Gateway

__all__ = ["MetricsPort", "scrape"]


async def scrape(gateway: "Gateway") -> bytes:
    """The metrics of the gateway, of all its workers."""
    gateway.refresh_metrics()
    return await asyncio.to_thread(gateway.metrics.render)


class MetricsPort:
    """`start`, then `stop`, on one event loop."""

    def __init__(self, gateway: "Gateway", listener: socket.socket) -> None:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        self._gateway, self._listener = gateway, listener
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)

    async def start(self) -> None:
        await self._runner.setup()
        await web.SockSite(self._runner, self._listener).start()

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=await scrape(self._gateway), headers={"Content-Type": CONTENT_TYPE_LATEST})
