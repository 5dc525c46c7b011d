"""The hot path: `POST /v1/chat/completions` and `/v1/completions` as a raw ASGI callable.

    key ▶ body (413, 400) ▶ service (404) ▶ prompt ▶ limits (429) ▶ door (429, 503, 504) ▶ attempts ▶ relay

Room: gateway/proxy. Raw ASGI, because a framework's request, response and middleware objects cost more than
all we do. Everything a client can cause becomes an answer in the OpenAI shape here, and nowhere else; every
request is counted here once, whatever happens.

A client that leaves (P9): nothing but `receive` tells, and a task that waits in it costs as much as a small
request. So the watch begins when a request has lasted `_WATCH_AFTER`; it cancels the request's own task, and
the `finally` blocks on the way out drop the pod's connection, close the lease and leave the queue.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from leadline.gateway.admission.admission import Admission
from leadline.gateway.errors import GatewayRefusal
from leadline.gateway.metrics import GatewayMetrics
from leadline.gateway.principal import Principal
from leadline.gateway.proxy.access_log import AccessLog
from leadline.gateway.proxy.attempts import Dispatcher
from leadline.gateway.proxy.body import read_incoming
from leadline.gateway.proxy.call import Call
from leadline.gateway.proxy.gate import KeyGate
from leadline.gateway.proxy.relay import Client, relay
from leadline.gateway.proxy.routing import read_prompt
from leadline.gateway.proxy.settings import ProxySettings
from leadline.gateway.proxy.tracing import Tracing
from leadline.gateway.services import ServiceTable
from leadline.protocol.errors import RequestError, encode_error

__all__ = ["PATHS", "ProxyHandler", "error_answer"]

logger = logging.getLogger("leadline.gateway")

PATHS = {"/v1/chat/completions": True, "/v1/completions": False}
"""Path → whether it is a chat."""
_WATCH_AFTER = 0.02

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class BodyTooLarge(RequestError):
    """Larger than the gateway takes."""

    status = 413


class UnsupportedEncoding(RequestError):
    """A compressed body, which cannot be routed."""

    status = 415


class InternalError(RequestError):
    """Our mistake."""

    status = 500
    type = "server_error"


class _ClientGone(Exception):
    """It left before its request was complete."""


class ProxyHandler:
    """One an event loop. `__call__` is the ASGI application for `PATHS`."""

    def __init__(
        self,
        *,
        table: ServiceTable,
        admission: Admission,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        settings: ProxySettings,
        gate: KeyGate,
        access_log: AccessLog | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._table = table
        self._admission = admission
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._settings = settings
        self._gate = gate
        self._access_log = access_log
        self._tracing = tracing
        self._rng = random.Random()
        self.in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(send)
        watch = _Watch(receive)
        exchange = _Exchange(time.monotonic())
        self.in_flight += 1
        try:
            await self._serve(scope, receive, client, watch, exchange)
        except RequestError as error:
            exchange.status = error.status
            if not client.started:
                await error_answer(error, client, exchange.extra_headers)
        except _ClientGone:
            exchange.status = 499
        except asyncio.CancelledError:
            exchange.status = 499
            if not watch.gone:
                raise
        except Exception:
            logger.exception("a request failed unexpectedly")
            exchange.status = 500
            if not client.started:
                fault = InternalError("internal error; the gateway's log says more", code="internal_error")
                await error_answer(fault, client, [])
        finally:
            watch.stop()
            self.in_flight -= 1
            self._close(scope, exchange)

    async def _serve(
        self, scope: Scope, receive: Receive, client: Client, watch: "_Watch", exchange: "_Exchange"
    ) -> None:
        headers: Headers = scope["headers"]
        authorization: str | None = None
        explain = False
        length = 0
        for name, value in headers:
            if name == b"authorization":
                authorization = value.decode("latin-1")
            elif name == b"x-leadline-explain":
                explain = value not in (b"", b"0", b"false")
            elif name == b"content-length":
                length = int(value) if value.isdigit() else 0
            elif name == b"content-encoding" and value.lower() != b"identity":
                raise UnsupportedEncoding(
                    "compressed request bodies are not supported: send JSON as it is", code="content_encoding"
                )
        principal = exchange.principal = await self._gate.authenticate(authorization)
        body = await _read_body(receive, length, self._settings.max_body_bytes)
        watch.start()

        began = time.monotonic()
        incoming = read_incoming(body, PATHS[scope["path"]])
        fields = incoming.fields
        service = self._table.resolve(fields.model, self._rng)
        self._gate.check_model(principal, fields.model, service)
        deadline = None if fields.deadline is None else exchange.arrived + fields.deadline
        metrics = self._metrics.service(service.name)
        prompt = await read_prompt(service, incoming)
        peer = scope.get("client")
        call = exchange.call = Call(
            path=_path(scope),
            headers=headers,
            client=peer[0] if peer else None,
            incoming=incoming,
            service=service,
            metrics=metrics,
            prompt=prompt,
            arrived=exchange.arrived,
            explain=explain,
            deadline=deadline,
            seed=self._rng.getrandbits(63) if incoming.resumable else None,
        )
        metrics.in_flight.inc()
        spent = time.monotonic() - began
        if self._tracing is not None:
            self._tracing.start(call)
        estimate = exchange.estimated = prompt.tokens + (incoming.max_tokens or 0) * incoming.choices
        limits = await self._gate.take(principal, estimate)
        exchange.taken = True
        if limits:
            call.extra_headers = exchange.extra_headers = [
                (name.lower().encode(), value.encode()) for name, value in limits.items()
            ]
        async with self._admission.enter(
            service, _Asking(principal, fields.priority_class), deadline, max(1, estimate)
        ) as ticket:
            if ticket.waited_seconds:
                metrics.queued.observe(ticket.waited_seconds)
            attempt = await self._dispatcher.answer(call, ticket=ticket)
            metrics.routing.observe(spent + call.picking_seconds)
            await relay(self._dispatcher, call, attempt, client)

    def _close(self, scope: Scope, exchange: "_Exchange") -> None:
        call = exchange.call
        if call is None:
            self._metrics.service("").ended(exchange.status)
        else:
            if exchange.status:
                call.status = exchange.status
            call.close()
            if exchange.taken:
                usage = call.usage
                if usage is not None:
                    self._gate.settle(exchange.principal, exchange.estimated, usage.total_tokens)
                elif call.status >= 400:
                    self._gate.settle(exchange.principal, exchange.estimated, 0)
            if self._tracing is not None:
                self._tracing.end(call)
        if self._access_log is not None:
            self._access_log.write(scope, exchange.arrived, exchange.status, call, exchange.principal)


class _Exchange:
    """What is known of one request for the books."""

    __slots__ = ("arrived", "call", "estimated", "extra_headers", "principal", "status", "taken")

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.status = 0
        """Where it did not end with a pod's answer."""
        self.call: Call | None = None
        self.principal: Any = None
        self.extra_headers: Headers = []
        self.estimated = 0
        self.taken = False


class _Asking:
    """A principal at the door: its key's class, unless the request asks for less."""

    __slots__ = ("priority_class", "tenant")

    def __init__(self, principal: Principal, asked: str | None) -> None:
        self.tenant = principal.tenant
        self.priority_class = "batch" if asked == "batch" else principal.priority_class


class _Watch:
    """Cancels the request's task when the client leaves."""

    __slots__ = ("_receive", "_task", "_timer", "_watching", "gone")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._timer: asyncio.TimerHandle | None = None
        self._watching: asyncio.Task[None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self.gone = False

    def start(self) -> None:
        """Call it when the body was read."""
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(_WATCH_AFTER, self._begin)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._watching is not None:
            self._watching.cancel()
        task, self._task = self._task, None
        if self.gone and task is not None:
            while task.cancelling():
                task.uncancel()

    def _begin(self) -> None:
        self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._task is not None:
            self.gone = True
            self._task.cancel()


async def _read_body(receive: Receive, declared: int, limit: int) -> bytes:
    """Raises BodyTooLarge, _ClientGone."""
    if declared > limit:
        raise _too_large(limit)
    message = await receive()
    if message["type"] == "http.disconnect":
        raise _ClientGone
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        if len(body) > limit:
            raise _too_large(limit)
        return body
    pieces, size = [body], len(body)
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientGone
        piece = message.get("body", b"")
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return b"".join(pieces)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is longer than the limit of {limit} bytes", code="body_too_large")


def _path(scope: Scope) -> bytes:
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope.get("query_string", b"")
    return raw + b"?" + query if query else raw


async def error_answer(error: RequestError, client: Client, extra: Headers) -> None:
    """An OpenAI-shaped answer."""
    body = encode_error(error.message, type=error.type, param=error.param, code=error.code)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *extra]
    retry_after = getattr(error, "retry_after", None)
    if retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, round(retry_after))))
    if isinstance(error, GatewayRefusal):
        headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    with contextlib.suppress(OSError):
        await client.start(error.status, headers)
        await client.write(body, more=False)
