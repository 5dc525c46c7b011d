"""A proxy between clients and the gateway that keeps requests and lets a test act in the middle of a stream.

A client uses `URL/NAME` in place of the gateway's address. Bytes pass unchanged in both directions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

_OWN_HEADERS = {
    "host",
    "connection",
    "transfer-encoding",
    "content-length",
    "accept-encoding",
    "content-encoding",
}


@dataclass
class Exchange:
    """One request of a client and its answer."""

    client: str
    path: str
    headers: dict[str, str]
    body: Any
    """Decoded JSON; None where there is none."""
    status: int = 0
    answered: dict[str, str] = field(default_factory=dict)
    """Headers of the answer."""
    data: bytes = b""
    """The answer so far."""

    @property
    def pod(self) -> str:
        return self.answered.get("x-leadline-pod", "")


async def _nothing(exchange: Exchange) -> None:
    pass


class RecordingProxy:
    """Runs in a thread. `exchanges` has all requests in the order in which they came."""

    def __init__(
        self,
        upstream: str,
        before: Callable[[Exchange], Awaitable[None]] = _nothing,
        during: Callable[[Exchange], Awaitable[None]] = _nothing,
    ) -> None:
        """`before` is awaited before a request is passed on, `during` after each piece of its answer."""
        self._upstream = upstream
        self._before, self._during = before, during
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._session: aiohttp.ClientSession
        self.exchanges: list[Exchange] = []
        self.url = ""

    def __enter__(self) -> RecordingProxy:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def of(self, client: str) -> list[Exchange]:
        return [exchange for exchange in self.exchanges if exchange.client == client]

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0),
        )
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{client}/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        path = "/" + request.match_info["path"] + (f"?{request.query_string}" if request.query_string else "")
        try:
            body = json.loads(data)
        except ValueError:
            body = None
        exchange = Exchange(request.match_info["client"], path, dict(request.headers), body)
        self.exchanges.append(exchange)
        await self._before(exchange)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OWN_HEADERS}
        async with self._session.request(
            request.method, self._upstream + path, data=data, headers=headers, allow_redirects=False
        ) as answer:
            exchange.status = answer.status
            exchange.answered = {name.lower(): value for name, value in answer.headers.items()}
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _OWN_HEADERS}
            response = web.StreamResponse(status=answer.status, headers=kept)
            with contextlib.suppress(ConnectionError):  # some clients leave after the last event
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    exchange.data += piece
                    await response.write(piece)
                    await self._during(exchange)
                await response.write_eof()
            return response
