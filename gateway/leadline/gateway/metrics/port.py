"""`GET /metrics` on a port of its own, which is not published with the API: it names services and their
traffic."""

import socket
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

__all__ = ["MetricsPort"]


class MetricsPort:
    """`start`, then `stop`, on one event loop."""

    def __init__(self, scrape: Callable[[], Awaitable[bytes]], listener: socket.socket) -> None:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        self._scrape, self._listener = scrape, listener
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)

    async def start(self) -> None:
        await self._runner.setup()
        await web.SockSite(self._runner, self._listener).start()

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=await self._scrape(), headers={"Content-Type": CONTENT_TYPE_LATEST})
