"""HTTP/1.1 from clients: what uvicorn runs on each connection in place of its own protocol.

Room: gateway/proxy. uvicorn keeps the sockets, the lifespan and the shutdown; between a client's bytes and a
handler stands this class alone, because an ASGI server's messages, events and scopes cost a small request as
much as routing it does.

    bytes ─▶ httptools ─▶ Exchange ─▶ app.respond(exchange) as a task ─▶ the next one of the connection
                              ▲                 │
                              └── connection lost: its task is cancelled (P9)

Requests of one connection are answered one after the other. A client that pipelines is read no further than
one waiting request; one that does not read its answers, no further than its socket. What clients must hold
to: `request_timeout` from the first byte of a request to its last (408), `max_header_bytes` (431),
`keep_alive` seconds between requests, and some bytes read every `write_timeout` seconds while an answer waits
to be sent (else the connection is broken off, which frees the pod). After an answer that came before the
request was complete the rest is read and thrown away for a moment, since closing at once would make the
client's system drop the answer.
"""

import asyncio
import logging
import time
from collections import deque
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.server import ServerState

from leadline.gateway.proxy.client_socket import ClientSocket
from leadline.gateway.proxy.deadlines import Deadlines
from leadline.gateway.proxy.exchange import Exchange, SlowRequest, whole_answer
from leadline.protocol.errors import RequestError, encode_error

__all__ = ["ServerProtocol"]

_HIGH_WATER = 256 << 10
"""Bytes of a body that nobody has asked for yet, before the socket is left alone."""
_LINGER = 3.0
"""Seconds for which the rest of a request that was answered already is thrown away."""
_GRACE = 1.0
"""Seconds that a connection without a request yet gets for one when the server stops: what it sends is on its
way, and a client cannot know that it was not read."""
_FLUSH = 30.0
"""Seconds that a client gets to read the last answer of its connection."""
_UPGRADE = frozenset((b"connection", b"upgrade", b"http2-settings"))
logger = logging.getLogger("leadline.gateway")

_JSON = [(b"content-type", b"application/json")]


class _HeadTooLong(RequestError):
    status = 431


class _BadRequest(RequestError):
    status = 400


class ServerProtocol(ClientSocket):
    """Give it to `uvicorn.Config(http=…)`. The application has `respond(exchange)`, which gives a coroutine,
    `settings` (ProxySettings) and `deadlines`."""

    __slots__ = (
        "_app",
        "_deadlines",
        "_deaf",
        "_ending",
        "_exchange",
        "_header_bytes",
        "_headers",
        "_incoming",
        "_last",
        "_lingering",
        "_loop",
        "_open",
        "_parser",
        "_settings",
        "_state",
        "_task",
        "_timed",
        "_unsent",
        "_url",
        "_used",
        "_waiting",
        "_write_by",
    )

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__()
        if not config.loaded:
            config.load()
        app: Any = config.loaded_app
        self._app = app
        self._settings = app.settings
        self._deadlines: Deadlines = app.deadlines
        self._state = server_state
        self._loop = _loop or asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        # A client may send more behind a request that says "close": it is ignored, the request is answered.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._header_bytes = 0
        self._open = False
        """Of a request some bytes have come, and some are missing."""
        self._timed = False
        """And the deadline of the connection is this request's."""
        self._incoming: Exchange | None = None
        """The request whose body is being read."""
        self._exchange: Exchange | None = None
        """The request that is being answered."""
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[Exchange] = deque()
        """Requests behind it."""
        self._deaf = False
        """Nothing that comes is of interest any more."""
        self._last = False
        """No request is taken behind those that have come."""
        self._lingering = False
        """The last answer was given, and its request comes on."""
        self._used = False
        """A request has come."""
        self._ending = False
        """The server stops; the next request is the last one."""
        self._write_by = 0.0
        """While writing is paused: when the client must have read some of what waits for it."""
        self._unsent = 0
        """Bytes that waited when it was last looked."""

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._state.connections.add(self)  # type: ignore[arg-type]
        self._deadlines.set(self, time.monotonic() + self._settings.keep_alive)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._open and self._incoming is None:
            self._header_bytes += len(data)  # a line that does not end reaches no callback
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(error)
            return
        if self._open:
            self._unfinished()

    def connection_lost(self, error: Exception | None) -> None:
        self._state.connections.discard(self)
        self._deadlines.forget(self)
        self._transport = self._incoming = None
        self._deaf = True
        self._waiting.clear()
        self.resume_writing()
        exchange, task = self._exchange, self._task
        if exchange is not None and not exchange.finished:
            exchange.lost()
            if task is not None:
                task.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        transport = self._transport
        if transport is not None:
            self._unsent = transport.get_write_buffer_size()
            self._write_by = time.monotonic() + self._settings.write_timeout
            if not self._timed:
                self._deadlines.set(self, self._write_by)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._next()

    # httptools

    def on_message_begin(self) -> None:
        self._open = True
        self._url = b""
        self._headers = []
        self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > self._settings.max_header_bytes:
            raise ValueError("headers are too long")
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        if self._last or parser.should_upgrade():
            return
        modern = parser.get_http_version() == "1.1"
        expects = False
        for name, value in self._headers:
            if name == b"expect":
                expects = value.lower() == b"100-continue"
        keep_alive = modern and parser.should_keep_alive() and not self._ending
        self._used = True
        self._last = not keep_alive
        self._incoming = Exchange(
            self,
            parser.get_method(),
            self._url,
            self._headers,
            keep_alive=keep_alive,
            modern=modern,
            expects=expects,
        )

    def on_body(self, data: bytes) -> None:
        exchange = self._incoming
        if exchange is not None and not exchange.finished and exchange.received(data) > _HIGH_WATER:
            self._pause_reading()

    def on_message_complete(self) -> None:
        self._open = self._timed = False
        exchange, self._incoming = self._incoming, None
        if exchange is None:
            return
        exchange.received_all()
        if exchange.finished:
            self._close()  # it was answered long before, and the rest was thrown away
        elif exchange is self._exchange:
            return
        elif self._exchange is None and not self._waiting and not self.write_paused:
            self._begin(exchange)
        else:
            self._waiting.append(exchange)
            self._pause_reading()

    # For exchanges

    def wanted(self) -> None:
        """Somebody waits for the rest of a body."""
        if not self._waiting:
            self._resume_reading()

    def answered(self, exchange: Exchange) -> None:
        """The whole answer was written: on to the next request."""
        self._state.total_requests += 1
        self._exchange = self._task = None
        if not exchange.keep_alive:
            self._last = True
            if exchange.complete and not self._deaf:
                self._close()
            else:
                self._linger()
        elif self._waiting or self._incoming is not None:
            self._next()
        elif not self._timed:
            self._deadlines.set(self, time.monotonic() + self._settings.keep_alive)

    # uvicorn and Deadlines

    def shutdown(self) -> None:
        """The server stops: close at once, behind the answers to what has come, or behind what must be on its
        way."""
        if self._exchange is None and not self._waiting and (self._open or not self._used) and not self._deaf:
            self._ending = True
            if self._incoming is None:
                self._deadlines.set(self, time.monotonic() + _GRACE)
                return
        if not self._close_behind():
            self._close()

    def expired(self) -> None:
        transport = self._transport
        if transport is None:
            return
        if transport.is_closing():
            transport.abort()  # it does not read what it was sent
        elif self.write_paused:
            self._stalled(transport)
        elif self._lingering:
            self._close()
        elif self._timed and self._reading_paused:
            self._deadlines.set(self, time.monotonic() + self._settings.request_timeout)  # we make it wait
        elif self._timed:
            fault = SlowRequest(
                f"the request did not arrive within {self._settings.request_timeout:g} s",
                code="request_timeout",
            )
            if self._incoming is not None:
                self._incoming.failed(fault)
            else:
                self._give_up(fault)
        elif self._exchange is None:
            self._close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _begin(self, exchange: Exchange) -> None:
        self._exchange = exchange
        task = self._task = self._loop.create_task(self._app.respond(exchange))
        self._state.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nobody is left without an answer: a handler that gave none had a fault of its own."""
        self._state.tasks.discard(task)
        exchange = self._exchange
        if task is not self._task or exchange is None or exchange.finished or self._transport is None:
            return
        fault = None if task.cancelled() else task.exception()
        logger.error("%r ended without an answer", exchange.target, exc_info=fault)
        if exchange.started:
            self.drop()
        else:
            body = encode_error("internal error; the gateway's log says more", type="server_error")
            exchange.answer(500, _JSON, body)

    def _stalled(self, transport: asyncio.Transport) -> None:
        """The client stays, and does not read: it must not keep a pod busy."""
        now, unsent = time.monotonic(), transport.get_write_buffer_size()
        if now >= self._write_by and unsent >= self._unsent:
            logger.info(
                "a client read nothing for %g s; its connection is closed", self._settings.write_timeout
            )
            self._app.client_stalled()
            transport.abort()
            return
        if now >= self._write_by:
            self._unsent = unsent
            self._write_by = now + self._settings.write_timeout
        self._deadlines.set(self, self._write_by)

    def _next(self) -> None:
        """Begin with the next request, if there is one and its answer could be written."""
        if self._exchange is not None or self.write_paused or self._transport is None:
            return
        if self._waiting:
            self._begin(self._waiting.popleft())
        elif self._incoming is not None and not self._incoming.finished:
            self._begin(self._incoming)
        if not self._waiting:
            self._resume_reading()

    def _unfinished(self) -> None:
        """A request that came in part: its time runs, and its head is enough to begin with."""
        if self._header_bytes > self._settings.max_header_bytes:
            self._refuse(ValueError("headers are too long"))
            return
        if not self._timed and not self._lingering and not (self._ending and self._incoming is None):
            self._timed = True
            self._deadlines.set(self, time.monotonic() + self._settings.request_timeout)
        if not self._waiting:
            self._next()

    def _decline_upgrade(self, rest: bytes) -> None:
        """No other protocol is spoken here, which a server says by ignoring the wish (RFC 9110 section 7.8).
        The parser takes no body behind one: it gets the same request without it."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(ValueError("CONNECT is for proxies"))
            return
        lines = [b"%s %s HTTP/1.1" % (method, self._url)]
        lines += [b"%s: %s" % pair for pair in self._headers if pair[0] not in _UPGRADE]
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _refuse(self, error: Exception) -> None:
        """What came is not HTTP, or too much of it."""
        if self._header_bytes > self._settings.max_header_bytes:
            fault: RequestError = _HeadTooLong(
                f"the headers are longer than the limit of {self._settings.max_header_bytes} bytes",
                code="headers_too_large",
            )
        else:
            fault = _BadRequest(f"this is not a valid HTTP request: {error}", code="invalid_http")
        self._deaf = True
        if self._incoming is not None:
            self._incoming.failed(fault)
            self._next()
        else:
            self._give_up(fault)

    def _give_up(self, fault: RequestError) -> None:
        """Answer what never became a request, and close. Answers in front of it are given first."""
        self._deaf = True
        self._timed = False
        if not self._close_behind():
            body = encode_error(fault.message, type=fault.type, param=fault.param, code=fault.code)
            self.send(whole_answer(fault.status, _JSON, body, close=True))
            self._linger()

    def _close_behind(self) -> bool:
        """Close behind the answer to the last request that has come; False if all were answered."""
        self._last = True
        last = self._incoming or (self._waiting[-1] if self._waiting else self._exchange)
        if last is None or last.finished:
            return False
        last.keep_alive = False
        return True

    def _linger(self) -> None:
        """Say that no answer follows, and throw away what still comes: a socket that is closed with bytes
        unread takes the answers back that its client has not read yet."""
        if self._transport is not None:
            if self._deaf and self._transport.can_write_eof():
                self._transport.write_eof()
            self._lingering = True
            self._deadlines.set(self, time.monotonic() + _LINGER)
            self._resume_reading()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._deadlines.set(self, time.monotonic() + _FLUSH)
