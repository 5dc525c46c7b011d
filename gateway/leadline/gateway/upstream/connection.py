"""HTTP/1.1 to pods: connections kept alive in one pool a pod, answers as they arrive.

This is our own client rather than a library, because the gateway spends most of its time in it: no objects
for URLs, cookies, redirects and codecs, bytes stay bytes, and the owner of a connection decides when it is
dropped, which tells the pod that the rest of its answer is not wanted.

    connection = await pool.take()              # fresh or reused; ConnectFailed, UpstreamTimeout
    connection.send(head, body)
    await connection.answered(until)            # status and headers; UpstreamLost, UpstreamTimeout
    while piece := await connection.read(until): ...
    connection.release()                        # always: back to the pool if it can be used again

Times are `time.monotonic()`. `connection.status` and `taken()` return what has arrived without waiting. One
owner at a time; reading and releasing happen on the event loop's thread. `Pool` takes the connection used
last first, so that those which are not needed grow old and are dropped.
"""

import asyncio
import contextlib
import time
from collections import deque

import httptools

from leadline.protocol.http.deadlines import Deadlines

__all__ = [
    "ConnectFailed",
    "Connection",
    "PodHangs",
    "Pool",
    "UpstreamError",
    "UpstreamLost",
    "UpstreamTimeout",
]


_HIGH_WATER = 256 << 10
"""Bytes of an answer held for a slow reader before the socket is left alone."""
_MAX_HEADERS = 64 << 10
_FRAMING = frozenset((b"content-length", b"transfer-encoding"))


class UpstreamError(Exception):
    """The pod did not answer as HTTP wants; nothing the client did."""


class ConnectFailed(UpstreamError):
    """No connection came about: the pod has seen nothing of the request."""


class UpstreamLost(UpstreamError):
    """The connection broke, or what came was not HTTP."""


class UpstreamTimeout(UpstreamError):
    """Nothing came for as long as we were ready to wait."""


class PodHangs(UpstreamTimeout):
    """The pod takes connections and answers nothing at all."""


class Connection(asyncio.Protocol):
    """One connection to one pod, carrying one request at a time."""

    __slots__ = (
        "_buffered",
        "_complete",
        "_error",
        "_header_bytes",
        "_ignore",
        "_keep_alive",
        "_loop",
        "_parser",
        "_paused",
        "_pieces",
        "_pool",
        "_transport",
        "_until_close",
        "_waiter",
        "answering",
        "headers",
        "idle_since",
        "status",
        "used",
    )

    def __init__(self, pool: "Pool", loop: asyncio.AbstractEventLoop) -> None:
        self._pool = pool
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._error: UpstreamError | None = None
        self._paused = False
        self.used = 0
        """Requests it has carried, the present one included."""
        self.idle_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.answering = False
        """Some byte of an answer has come."""
        self._header_bytes = 0
        self._pieces: list[bytes] = []
        self._buffered = 0
        self._ignore = False
        self._until_close = False
        self._complete = False
        self._keep_alive = False

    # For the owner

    @property
    def usable(self) -> bool:
        """It may carry another request."""
        return self._error is None and self._transport is not None and not self._transport.is_closing()

    @property
    def complete(self) -> bool:
        """The whole answer has come (some of it may not have been read yet)."""
        return self._complete

    def send(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        self._reset()
        self.used += 1
        if len(body) < 1 << 16:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    async def answered(self, until: float) -> int:
        """Wait for status and headers, which stand in `status` and `headers` then."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._wait(until)
        return self.status

    async def read(self, until: float) -> bytes:
        """What has come of the body, at least one byte; b"" at its end."""
        while not self._pieces:
            if self._complete:
                return b""
            if self._error is not None:
                raise self._error
            await self._wait(until)
        return self.taken()

    def taken(self) -> bytes:
        """What has come of the body since the last time; b"" if nothing has."""
        pieces = self._pieces
        if not pieces:
            return b""
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._buffered = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    def release(self) -> None:
        """The owner is done with it. An answer that is not complete is cut off, which tells the pod."""
        if self._complete and not self._pieces and self.usable and self._keep_alive:
            self._pool.put(self)
        else:
            self.abort()

    def abort(self) -> None:
        if self._error is None:
            self._error = UpstreamLost("the connection was dropped")
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self, until: float) -> None:
        waiter = self._waiter = self._loop.create_future()
        self._pool.deadlines.set(self, until)
        try:
            await waiter
        finally:
            self._waiter = None

    def expired(self) -> None:
        """Nothing came until the deadline. (Of a wait that is over, this says nothing.)"""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_exception(UpstreamTimeout("the pod did not answer in time"))

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._pool.open += 1

    def data_received(self, data: bytes) -> None:
        if not self.used or self._complete:
            # Bytes without a request: they may belong to another answer.
            self._fail("the pod sent bytes outside of an answer")
            return
        self.answering = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the pod's answer is not HTTP: {error}")
            return
        if self._buffered > _HIGH_WATER and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        if self._until_close and self.status and error is None:
            self._complete = True
        if self._error is None:
            self._error = UpstreamLost(f"the pod closed the connection{f': {error}' if error else ''}")
        self._transport = None
        self._pool.deadlines.forget(self)
        self._pool.lost(self)
        self._wake()

    def _fail(self, message: str) -> None:
        if self._error is None:
            self._error = UpstreamLost(message)
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    # httptools

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("a second answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > _MAX_HEADERS:
            raise ValueError("headers are too long")
        if self.status:
            return  # a trailer
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not 100 <= status < 600:
            raise ValueError(f"no status: {status}")
        if status < 200:  # 100 Continue, 103 Early Hints: the answer is yet to come
            self._ignore = True
            return
        self.status = status
        if status not in (204, 304):
            # RFC 9112 section 6.3: without a length the body ends with the connection.
            self._until_close = not any(name in _FRAMING for name, _ in self.headers)

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)
        self._buffered += len(data)

    def on_message_complete(self) -> None:
        if self._ignore:
            self._ignore = False
            self.headers = []
            return
        self._complete = True
        self._keep_alive = not self._until_close and bool(self._parser.should_keep_alive())


class Pool:
    """Idle connections to one pod, last used first."""

    __slots__ = (
        "_closed",
        "_idle",
        "_loop",
        "_max_idle",
        "address",
        "connect_seconds",
        "deadlines",
        "idle_seconds",
        "open",
    )

    def __init__(
        self,
        address: str,
        deadlines: Deadlines,
        *,
        connect_seconds: float = 2.0,
        idle_seconds: float = 4.0,
        max_idle: int = 512,
    ) -> None:
        """`address`: host:port. `deadlines`: of all pools of the event loop. `idle_seconds` lies below the
        keep-alive timeout of common servers (5 s)."""
        self.address = address
        self.deadlines = deadlines
        self.connect_seconds = connect_seconds
        self.idle_seconds = idle_seconds
        self._max_idle = max_idle
        self._idle: deque[Connection] = deque()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self.open = 0
        """Connections that exist, idle ones included."""

    def idle(self) -> "Connection | None":
        """A connection that is there already; None: `take` makes one."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.usable and time.monotonic() - connection.idle_since < self.idle_seconds:
                return connection
            connection.abort()
        return None

    async def take(self, *, fresh: bool = False) -> Connection:
        """An idle connection, or a new one. `fresh`: a new one in any case."""
        if not fresh and (connection := self.idle()) is not None:
            return connection
        host, port = _host_and_port(self.address)
        try:
            async with asyncio.timeout(self.connect_seconds):
                _, made = await self._loop.create_connection(lambda: Connection(self, self._loop), host, port)
        except TimeoutError:
            raise UpstreamTimeout(f"{self.address} took no connection in time") from None
        except OSError as error:
            raise ConnectFailed(f"cannot connect to {self.address}: {error.strerror or error}") from None
        return made

    def put(self, connection: Connection) -> None:
        if self._closed or len(self._idle) >= self._max_idle:
            connection.abort()
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def lost(self, connection: Connection) -> None:
        self.open -= 1
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def close(self) -> None:
        """Drop what is idle now and whatever is released later."""
        self._closed = True
        while self._idle:
            self._idle.pop().abort()


def _host_and_port(address: str) -> tuple[str, int]:
    """host:port, the host of IPv6 in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
