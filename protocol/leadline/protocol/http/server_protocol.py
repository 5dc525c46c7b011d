"""HTTP/1.1 from clients: the protocol class that uvicorn runs on each connection in place of its own.

uvicorn keeps the sockets, the lifespan and the shutdown. Between a client's bytes and a handler there is only
this class, because the messages, events and scopes of an ASGI server cost a small request as much as routing.

    bytes ─▶ ClientSocket ─▶ RequestReader ─▶ Exchange ─▶ app.respond(exchange) as a task ─▶ the next request
                                                  ▲                 │
                                                  └── connection lost: its task is cancelled (P9)

The requests of one connection are answered one after the other. Of a client that pipelines, one waiting
request is parsed and a bounded rest is kept; a client that does not read its answers gets no more than its
socket holds. Limits: `request_timeout` from the first byte of a request to its last (408), `max_header_bytes`
(431), `keep_alive` seconds between requests, and some bytes read every `write_timeout` seconds while an
answer waits to be sent (else the connection is aborted, which frees the pod). After an answer that came
before its request was complete, the rest is read and dropped for a moment: closing at once would make the
client's system drop the answer.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine
from typing import Any, Protocol

import httptools

from leadline.protocol.errors import RequestError
from leadline.protocol.http.answers import InternalError, answer_to
from leadline.protocol.http.cors import answer_preflight, mark_allowed
from leadline.protocol.http.deadlines import Deadlines
from leadline.protocol.http.exchange import Exchange, SlowRequest, path_of, whole_answer
from leadline.protocol.http.settings import HttpSettings
from leadline.protocol.listening import plain_address

__all__ = ["HttpApp", "ServerProtocol"]


class ClientSocket(asyncio.Protocol):
    """The bytes of a client's connection, read and written no faster than the other side can follow."""

    __slots__ = ("_drain", "_reading_paused", "_transport", "client", "write_paused")

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        """None before the connection and after it."""
        self.client: str | None = None
        """The address of the other side."""
        self._reading_paused = False
        self.write_paused = False
        """The client reads its answers slower than they come."""
        self._drain: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        peer = transport.get_extra_info("peername")
        self.client = plain_address(peer[0]) if isinstance(peer, tuple) else None

    def eof_received(self) -> bool:
        """A client that sends no more counts as one that has left."""
        return False

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        drain, self._drain = self._drain, None
        if drain is not None and not drain.done():
            drain.set_result(None)

    def send(self, data: bytes) -> None:
        """Nothing happens when the client is gone."""
        transport = self._transport
        if transport is not None:
            transport.write(data)

    async def drained(self) -> None:
        """Wait until the client has read some of what was written, or is gone."""
        while self.write_paused:
            if self._drain is None:
                self._drain = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._drain)

    def drop(self) -> None:
        """Break the connection off: what was sent cannot be made whole."""
        if self._transport is not None:
            self._transport.abort()

    def _pause_reading(self) -> None:
        if not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._reading_paused and self._transport is not None:
            self._reading_paused = False
            self._transport.resume_reading()


_HIGH_WATER = 256 << 10
"""Bytes buffered without a reader (of a body, or behind a waiting request) before reading is paused."""
_UPGRADE = frozenset((b"connection", b"upgrade", b"http2-settings"))


class _HeadTooLong(RequestError):
    status = 431


class _BadRequest(RequestError):
    status = 400


class RequestReader(ClientSocket, ABC):
    """Parses requests, each an Exchange from its head on. Refuses what is not HTTP, and heads that are too
    long. The subclass answers the requests."""

    __slots__ = (
        "_discard_input",
        "_ending",
        "_head_read",
        "_header_bytes",
        "_headers",
        "_held",
        "_incoming",
        "_last",
        "_open",
        "_parser",
        "_settings",
        "_url",
        "_used",
    )

    def __init__(self, settings: HttpSettings) -> None:
        super().__init__()
        self._settings = settings
        self._parser = httptools.HttpRequestParser(self)
        # A client may send more behind a request that says "close": it is ignored, the request is answered.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._header_bytes = 0
        """Of the present request's header lines."""
        self._head_read = 0
        """Bytes of a head that goes on: a line that does not end reaches no callback."""
        self._held: bytearray | None = None
        """While a request waits behind the running one: the bytes behind it. They are read, because only a
        read shows that a client has left, but not parsed."""
        self._open = False
        """Of a request some bytes have come, and some are missing."""
        self._incoming: Exchange | None = None
        """The request whose body is being read."""
        self._discard_input = False
        """Ignore further input: the connection is closing."""
        self._last = False
        """No request is taken behind those that have come."""
        self._used = False
        """A request has come."""
        self._ending = False
        """The server stops; the next request is the last one."""

    # For exchanges

    @abstractmethod
    def wanted(self) -> None:
        """A handler waits for the rest of a body."""

    @abstractmethod
    def answered(self, exchange: Exchange) -> None:
        """The whole answer was written."""

    # Of the half that answers

    @abstractmethod
    def _unfinished(self) -> None:
        """Bytes came, and a request is in part here."""

    @abstractmethod
    def _arrived(self, exchange: Exchange | None) -> None:
        """The last byte of a request came; None of one that is not taken."""

    @abstractmethod
    def _refused(self, fault: RequestError) -> None:
        """What came is no request, and nothing behind it can be one."""

    # asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        if self._discard_input:
            return
        if self._held is not None:
            self._held += data
            if len(self._held) > _HIGH_WATER:
                self._pause_reading()
            return
        head = self._headers if self._open and self._incoming is None else None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(error)
            return
        if self._open:
            if self._incoming is None and self._headers is head:  # all of it belongs to one head
                self._head_read += len(data)
            if self._head_read > self._settings.max_header_bytes:
                self._refuse(ValueError("headers are too long"))
            else:
                self._unfinished()

    # httptools

    def on_message_begin(self) -> None:
        self._open = True
        self._url = b""
        self._headers = []
        self._header_bytes = self._head_read = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
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
        self._headers = []  # what comes now are trailers, which are no headers

    def on_body(self, data: bytes) -> None:
        exchange = self._incoming
        if exchange is not None and not exchange.finished and exchange.received(data) > _HIGH_WATER:
            self._pause_reading()

    def on_message_complete(self) -> None:
        self._open = False
        exchange, self._incoming = self._incoming, None
        if exchange is not None:
            exchange.received_all()
        self._arrived(exchange)

    # -- inside ----------------------------------------------------------------------------------------------

    @property
    def _path(self) -> str:
        """Of the request whose head is being read, as far as it has come; empty where nothing has."""
        return path_of(self._url) if self._url else ""

    def _hold(self) -> None:
        """Parse no further until `_release`."""
        if self._held is None:
            self._held = bytearray()

    def _release(self) -> None:
        held, self._held = self._held, None
        self._resume_reading()
        if held:
            self.data_received(bytes(held))

    def _decline_upgrade(self, rest: bytes) -> None:
        """No other protocol is spoken here, which a server says by ignoring the request for one (RFC 9110
        section 7.8). The parser takes no body behind one: it gets the same request without it."""
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
        if max(self._header_bytes, self._head_read) > self._settings.max_header_bytes:
            fault: RequestError = _HeadTooLong(
                f"the headers are longer than the limit of {self._settings.max_header_bytes} bytes",
                code="headers_too_large",
            )
        else:
            fault = _BadRequest(f"this is not a valid HTTP request: {error}", code="invalid_http")
        self._refused(fault)


_LINGER = 3.0
"""Seconds for which the rest of a request that was answered already is thrown away."""
_GRACE = 1.0
"""Seconds that a connection without a request yet gets for one when the server stops: what it sends is on its
way, and a client cannot know that it was not read."""
_FLUSH = 30.0
"""Seconds that a client gets to read the last answer of its connection."""
logger = logging.getLogger("leadline.http")


class HttpApp(Protocol):
    """An application that `ServerProtocol` can serve."""

    @property
    def settings(self) -> HttpSettings: ...

    @property
    def deadlines(self) -> Deadlines:
        """Those of clients' connections."""
        ...

    def respond(self, exchange: Exchange) -> Coroutine[Any, Any, None]:
        """Answer one request. Cancelled when the client leaves."""
        ...

    def client_stalled(self) -> None:
        """A client was cut off because it did not read its answer."""
        ...


class ServerProtocol(RequestReader):
    """Give it to `uvicorn.Config(http=…)`, with an `HttpApp` as the application."""

    __slots__ = (
        "_app",
        "_deadlines",
        "_exchange",
        "_lingering",
        "_loop",
        "_state",
        "_task",
        "_timed",
        "_unsent",
        "_waiting",
        "_write_by",
    )

    def __init__(
        self,
        config: Any,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        app: HttpApp = config.loaded_app
        super().__init__(app.settings)
        self._app = app
        self._deadlines = app.deadlines
        self._state = server_state
        self._loop = _loop or asyncio.get_running_loop()
        self._timed = False
        """The deadline of the connection is that of a request that has come in part."""
        self._exchange: Exchange | None = None
        """The request that is being answered."""
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[Exchange] = deque()
        """Requests behind it."""
        self._lingering = False
        """The last answer was given, and its request comes on."""
        self._write_by = 0.0
        """While writing is paused: when the client must have read some of what waits for it."""
        self._unsent = 0
        """Bytes that waited when it was last looked."""

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._state.connections.add(self)
        self._deadlines.set(self, time.monotonic() + self._settings.keep_alive)

    def connection_lost(self, error: Exception | None) -> None:
        self._state.connections.discard(self)
        self._deadlines.forget(self)
        self._transport = self._incoming = None
        self._discard_input = True
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

    # RequestReader

    def _unfinished(self) -> None:
        """Its time runs, and its head is enough to begin with."""
        if not self._timed and not self._lingering and not (self._ending and self._incoming is None):
            self._timed = True
            self._deadlines.set(self, time.monotonic() + self._settings.request_timeout)
        if not self._waiting:
            self._next()

    def _arrived(self, exchange: Exchange | None) -> None:
        self._timed = False
        if exchange is None:
            return
        if exchange.finished:
            self._close()  # it was answered long before, and the rest was thrown away
        elif exchange is self._exchange:
            return
        elif self._exchange is None and not self._waiting and not self.write_paused:
            self._begin(exchange)
        else:
            self._waiting.append(exchange)
            self._hold()

    def _refused(self, fault: RequestError) -> None:
        self._discard_input = True
        if self._incoming is not None:
            self._incoming.failed(fault)
            self._next()
        else:
            self._give_up(fault)

    # For exchanges

    def wanted(self) -> None:
        """A handler waits for the rest of a body."""
        if not self._waiting:
            self._release()

    def answered(self, exchange: Exchange) -> None:
        """The whole answer was written: on to the next request."""
        self._state.total_requests += 1
        self._exchange = self._task = None
        if not exchange.keep_alive:
            self._last = True
            if exchange.complete and not self._discard_input:
                self._close()
            else:
                self._linger()
            return
        self._next()
        if self._exchange is None and not self._timed:
            self._deadlines.set(self, time.monotonic() + self._settings.keep_alive)

    # uvicorn and Deadlines

    def shutdown(self) -> None:
        """The server stops: close at once, behind the answers to what has come, or behind what must be on its
        way."""
        if (
            self._exchange is None
            and not self._waiting
            and (self._open or not self._used)
            and not self._discard_input
        ):
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
        elif self._timed and (self._reading_paused or self._held is not None):
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
        origins = self._settings.cors_origins
        if origins and mark_allowed(exchange, origins) and answer_preflight(exchange):
            return
        task = self._task = self._loop.create_task(self._app.respond(exchange))
        self._state.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Answer with 500 where the handler ended without an answer."""
        self._state.tasks.discard(task)
        exchange = self._exchange
        if task is not self._task or exchange is None or exchange.finished or self._transport is None:
            return
        fault = None if task.cancelled() else task.exception()
        logger.error("%r ended without an answer", exchange.target, exc_info=fault)
        if exchange.started:
            self.drop()
        else:
            exchange.answer(*answer_to(InternalError(), exchange.path))

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
            self._release()

    def _give_up(self, fault: RequestError) -> None:
        """Answer what never became a request, and close. Answers in front of it are given first."""
        self._discard_input = True
        self._timed = False
        if not self._close_behind():
            self.send(whole_answer(*answer_to(fault, self._path), close=True))
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
            if self._discard_input and self._transport.can_write_eof():
                self._transport.write_eof()
            self._lingering = True
            self._deadlines.set(self, time.monotonic() + _LINGER)
            self._release()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._deadlines.set(self, time.monotonic() + _FLUSH)
