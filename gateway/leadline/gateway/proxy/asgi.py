"""Everything but the hot path: an ASGI application behind an Exchange.

Room: gateway/proxy. What ASGI asks of a server, as far as the gateway's own routes need it (HTTP, no
extensions): /health, /metrics, /v1/models and answers to paths that do not exist.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from leadline.gateway.errors import InternalError, answer_to, shutting_down
from leadline.gateway.proxy.exchange import ClientGone, Exchange
from leadline.protocol.errors import RequestError

__all__ = ["Receive", "Scope", "Send", "serve_asgi"]

logger = logging.getLogger("leadline.gateway")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_MAX_BODY = 1 << 20
"""None of these routes wants a body."""


async def serve_asgi(app: Callable[[Scope, Receive, Send], Awaitable[None]], exchange: Exchange) -> None:
    """One request through `app`. Its faults are logged, and answered with 500 if nothing was sent yet."""
    body: bytes | None = None
    status, headers = 200, list[tuple[bytes, bytes]]()

    async def receive() -> MutableMapping[str, Any]:
        nonlocal body
        if body is not None:
            message = {"type": "http.request", "body": body, "more_body": False}
            body = None
            return message
        await exchange.left()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], list(message.get("headers", ()))
            return
        if not exchange.started:
            exchange.start(status, headers)
        await exchange.write(message.get("body", b""), more=message.get("more_body", False))

    try:
        # All of it, wanted or not: behind an answer that comes sooner no other request can be read.
        body = await exchange.body(_MAX_BODY)
        await app(_scope(exchange), receive, send)
        if not (exchange.finished or exchange.started or exchange.gone):
            raise RuntimeError("the application ended without an answer")
    except ClientGone:
        pass
    except RequestError as error:
        _say(exchange, error)
    except asyncio.CancelledError:
        if not exchange.gone:
            _say(exchange, shutting_down())
            raise
    except Exception:
        logger.exception("%s %s failed", exchange.method.decode("latin-1"), exchange.path)
        _say(exchange, InternalError())
    finally:
        if not exchange.finished:
            exchange.drop()


def _say(exchange: Exchange, error: RequestError) -> None:
    if not exchange.started:
        exchange.answer(*answer_to(error))


def _scope(exchange: Exchange) -> Scope:
    raw, _, query = exchange.target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "server": None,
        "client": (exchange.client, 0) if exchange.client else None,
        "scheme": "http",
        "method": exchange.method.decode("latin-1"),
        "root_path": "",
        "path": exchange.path,
        "raw_path": raw,
        "query_string": query,
        "headers": exchange.headers,
    }
