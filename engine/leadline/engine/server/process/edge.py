"""The FastAPI application as `ServerProtocol` serves it: one exchange after the other, cut off where a client
does not read, and logged if the user wants that."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from typing import Any

from fastapi import FastAPI

from leadline.engine.server.settings import ServerSettings
from leadline.engine.server.state import ServerState
from leadline.protocol.http.asgi import Receive, Scope, Send, serve_asgi
from leadline.protocol.http.deadlines import Deadlines
from leadline.protocol.http.exchange import Exchange

__all__ = ["EngineEdge"]

logger = logging.getLogger("leadline.engine.access")


class EngineEdge:
    """An `HttpApp`. Any ASGI server can serve it too, without the limits of `HttpSettings`."""

    def __init__(self, app: FastAPI, settings: ServerSettings) -> None:
        self.settings = settings
        self.deadlines = Deadlines()
        self._app = app
        self._state: ServerState = app.state.server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def respond(self, exchange: Exchange) -> Coroutine[Any, Any, None]:
        if self.settings.access_log:
            return self._logged(exchange)
        return serve_asgi(self._app, exchange, self.settings.max_body_bytes)

    def client_stalled(self) -> None:
        self._state.metrics.stalled_clients.inc()

    async def _logged(self, exchange: Exchange) -> None:
        try:
            await serve_asgi(self._app, exchange, self.settings.max_body_bytes)
        finally:
            logger.info(
                '%s "%s %s" %d',
                exchange.client or "-",
                exchange.method.decode("latin-1"),
                exchange.target.decode("latin-1"),
                499 if exchange.gone else exchange.status,
            )
