"""An ASGI application behind an Exchange: every route off the gateway's hot path, and all of the engine's.

Gives what ASGI asks of a server as far as these routes need it: HTTP, no extensions. Every answer has an
`X-Request-ID` and a `Date`. A client that leaves cancels the application; `receive` never has to be watched
for it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from email.utils import formatdate
from typing import Any

from leadline.protocol.errors import RequestError
from leadline.protocol.http.answers import InternalError, ShuttingDown, answer_to
from leadline.protocol.http.exchange import ClientGone, Exchange
from leadline.protocol.http.headers import NAME, authorization_of, request_id

__all__ = ["EXCHANGE", "Receive", "Scope", "Send", "serve_asgi"]

logger = logging.getLogger("leadline.http")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_UNWANTED_BODY = 1 << 20
"""Bytes of a body that are read though the application did not ask for them."""

EXCHANGE = "leadline.exchange"
"""The key of an application's scope under which its Exchange lies."""


async def serve_asgi(
    app: Callable[[Scope, Receive, Send], Awaitable[None]], exchange: Exchange, max_body_bytes: int
) -> None:
    """Pass one request through `app`. Its faults are logged, and answered with 500 if nothing was sent yet.

    The body is read when `app` asks for it; that raises RequestError (413, 408) or ClientGone inside `app`.
    """
    body_wanted = True
    status, headers = 200, Headers()
    name, exchange.headers = request_id(exchange.headers)
    extra = [(NAME, name), (b"date", _date())]

    async def receive() -> MutableMapping[str, Any]:
        nonlocal body_wanted
        if body_wanted:
            body_wanted = False
            body = await exchange.body(max_body_bytes)
            return {"type": "http.request", "body": body, "more_body": False}
        await exchange.left()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], [*message.get("headers", ()), *extra]
            if not exchange.complete:
                # Behind an answer that comes sooner no other request of the connection can be read.
                with contextlib.suppress(RequestError):
                    await exchange.body(_UNWANTED_BODY)
            return
        if not exchange.started:
            exchange.start(status, headers)
        await exchange.write(message.get("body", b""), more=message.get("more_body", False))

    try:
        authorization_of(exchange.headers, max_body_bytes)
        await app(_scope(exchange), receive, send)
        if not (exchange.finished or exchange.started or exchange.gone):
            raise RuntimeError("the application ended without an answer")
    except ClientGone:
        pass
    except RequestError as error:
        _refuse(exchange, error, extra)
    except asyncio.CancelledError:
        if not exchange.gone:  # the server stops
            _refuse(exchange, ShuttingDown(), extra)
            raise
    except Exception:
        logger.exception("%s %s failed", exchange.method.decode("latin-1"), exchange.path)
        _refuse(exchange, InternalError(), extra)
    finally:
        if not exchange.finished:
            exchange.drop()


def _refuse(exchange: Exchange, error: RequestError, extra: Headers) -> None:
    if not exchange.started:
        status, headers, body = answer_to(error, exchange.path, dict(extra)[NAME])
        exchange.answer(status, headers + extra, body)


def _scope(exchange: Exchange) -> Scope:
    raw, _, query = exchange.target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1" if exchange.modern else "1.0",
        "server": None,
        "client": (exchange.client, 0) if exchange.client else None,
        "scheme": "http",
        "method": exchange.method.decode("latin-1"),
        "root_path": "",
        "path": exchange.path,
        "raw_path": raw,
        "query_string": query,
        "headers": exchange.headers,
        EXCHANGE: exchange,
    }


_dated: tuple[int, bytes] = (0, b"")


def _date() -> bytes:
    """The time as HTTP writes it, formatted once a second."""
    global _dated
    now = int(time.time())
    if _dated[0] != now:
        _dated = (now, formatdate(now, usegmt=True).encode())
    return _dated[1]
