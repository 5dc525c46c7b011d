"""One request of a client and the answer to it, as the protocol's connection hands them to a handler.

What ASGI's scope, receive and send would be, without the messages: a handler reads what
came, and gives an answer whole or in pieces.

    exchange.method, .target, .path, .headers, .client
    body = await exchange.body(limit)                  BodyTooLarge, SlowRequest, ClientGone
    exchange.answer(200, headers, body)                or, for a stream:
    exchange.start(200, headers)
    await exchange.write(piece, more=True)             …, and in the end more=False

Owns the framing of answers (RFC 9112 section 6): a length where the headers have one, else chunks, else, for
HTTP/1.0, the end of the connection. Head and first piece leave in one write: a system call is a tenth of what
a small request costs.
"""

import asyncio
import http
from functools import lru_cache
from typing import Protocol
from urllib.parse import unquote_to_bytes

import httptools

from leadline.protocol.errors import RequestError

__all__ = [
    "BodyTooLarge",
    "ClientConnection",
    "ClientGone",
    "Exchange",
    "SlowRequest",
    "path_of",
    "too_large",
    "whole_answer",
]

Headers = list[tuple[bytes, bytes]]

_NO_BODY = frozenset((204, 304))


def _status_line(status: int) -> bytes:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


_STATUS_LINES = {status: _status_line(status) for status in range(100, 600)}


@lru_cache(maxsize=256)
def path_of(target: bytes) -> str:
    """Return the path of a request's target, percent signs resolved."""
    try:
        path = httptools.parse_url(target).path
    except httptools.HttpParserInvalidURLError:
        path = target.partition(b"?")[0]
    return unquote_to_bytes(path or b"/").decode("utf-8", "replace")


class BodyTooLarge(RequestError):
    """Larger than the server takes."""

    status = 413


class SlowRequest(RequestError):
    """The request did not arrive in time."""

    status = 408


class ClientGone(Exception):
    """The client left before its request was complete."""


class ClientConnection(Protocol):
    """What an exchange needs of the connection that it came by."""

    client: str | None
    """The address of the client."""
    write_paused: bool
    """The client reads its answers slower than they come."""

    def send(self, data: bytes) -> None:
        """Write bytes; without effect when the client has left."""

    async def drained(self) -> None:
        """Wait until the client has read some of what was written, or has left."""

    def drop(self) -> None:
        """Abort the connection: what was sent cannot be completed."""

    def wanted(self) -> None:
        """Read on: a handler waits for the rest of a body."""

    def answered(self, exchange: "Exchange") -> None:
        """Go on with the next request: the whole answer was written."""


class Exchange:
    """One request and its answer. Lives on the event loop of its connection."""

    __slots__ = (
        "_chunked",
        "_expects",
        "_fault",
        "_head",
        "_left",
        "_pieces",
        "_size",
        "_waiter",
        "complete",
        "connection",
        "extra_headers",
        "finished",
        "gone",
        "headers",
        "keep_alive",
        "method",
        "modern",
        "path",
        "started",
        "status",
        "target",
    )

    def __init__(
        self,
        connection: ClientConnection,
        method: bytes,
        target: bytes,
        headers: Headers,
        *,
        keep_alive: bool,
        modern: bool,
        expects: bool,
    ) -> None:
        self.connection = connection
        self.method = method
        self.target = target
        """As in the request line, with its query."""
        self.path = path_of(target)
        """Of the target, percent signs resolved."""
        self.headers = headers
        """Names in lower case."""
        self.keep_alive = keep_alive
        self.modern = modern
        """HTTP/1.1, so the client understands chunks."""
        self._expects = expects
        self._pieces: list[bytes] = []
        self._size = 0
        self._fault: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.complete = False
        """All of the request has come."""
        self.gone = False
        """The client has left; what is written now goes nowhere."""
        self.status = 0
        """Of the answer, once it has begun."""
        self.extra_headers: Headers = []
        """Of the answer, whichever it is, beside those that its handler gives."""
        self.started = False
        self.finished = False
        """The whole answer was written."""
        self._head = b""
        """Status line and headers that wait for the first piece."""
        self._chunked = False
        self._left: int | None = None
        """Bytes still to come of an answer whose length was announced."""

    @property
    def client(self) -> str | None:
        """The address it comes from."""
        return self.connection.client

    # The request

    async def body(self, limit: int) -> bytes:
        """All of it. Raises BodyTooLarge, SlowRequest, ClientGone."""
        while not self.complete:
            if self._size > limit:
                raise too_large(limit)
            if self._fault is not None:
                raise self._fault
            if self.gone:
                raise ClientGone
            if self._expects:
                self._expects = False
                self.connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._waiter = asyncio.get_running_loop().create_future()
            self.connection.wanted()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._size > limit:
            raise too_large(limit)
        pieces = self._pieces
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def left(self) -> None:
        """Wait until the client has left or has its answer."""
        while not (self.gone or self.finished):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    # The answer

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer at once. `headers` say nothing of its length."""
        connection = self.connection
        if not self.complete:
            self.keep_alive = False
        if self.extra_headers:
            headers = [*headers, *self.extra_headers]
        bare, close = self.method == b"HEAD", not self.keep_alive
        data = whole_answer(status, headers, body, bare=bare, close=close)
        self.status = status
        self.started = self.finished = True  # not before: what cannot be written must not count as sent
        connection.send(data)
        connection.answered(self)

    def start(self, status: int, headers: Headers) -> None:
        """Status line and headers; they leave with the first `write`, which must follow."""
        if not self.complete:
            self.keep_alive = False
        if self.extra_headers:
            headers = [*headers, *self.extra_headers]
        lines = [_STATUS_LINES[status]]
        length: int | None = None
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
            if name == b"content-length":
                length = int(value)
        if self.method == b"HEAD" or status in _NO_BODY:
            length = 0
        elif length is None:
            self._chunked = self.modern
            if self.modern:
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                self.keep_alive = False
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        self._left = length
        self._head = _joined(lines, len(headers))
        self.status = status
        self.started = True

    async def write(self, data: bytes, *, more: bool) -> None:
        """A piece of the body; waits while the client does not read. `more`: it is not the last one."""
        connection = self.connection
        out = data
        if self._left is not None:
            if self.method == b"HEAD":
                out = b""
            elif len(data) > self._left or (not more and len(data) < self._left):
                self.drop()
                raise RuntimeError("an answer is not as long as its content-length says")
            else:
                self._left -= len(data)
        elif self._chunked:
            out = b"%x\r\n%s\r\n" % (len(data), data) if data else b""
            if not more:
                out += b"0\r\n\r\n"
        if self._head:
            out, self._head = self._head + out, b""
        if out:
            connection.send(out)
        if not more:
            self.finished = True
            connection.answered(self)
        elif connection.write_paused:
            await connection.drained()

    def push(self, data: bytes) -> None:
        """Write a piece of the body now, without waiting for the client. Only after a `write` that was not
        the last one, of an answer without a length, and while `connection.write_paused` is False."""
        self.connection.send(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def drop(self) -> None:
        """Break the connection off: the answer cannot be made whole."""
        self.connection.drop()

    # The connection

    def received(self, data: bytes) -> int:
        """Append a piece of the body. Return the bytes buffered beyond what the reader waits for."""
        self._pieces.append(data)
        self._size += len(data)
        self._wake()
        return self._size if self._waiter is None else 0

    def received_all(self) -> None:
        self.complete = True
        self._wake()

    def failed(self, fault: RequestError) -> None:
        """The rest of the request will not come."""
        self._fault = fault
        self._wake()

    def lost(self) -> None:
        """The connection is gone."""
        self.gone = True
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is longer than the limit of {limit} bytes", code="body_too_large")


def whole_answer(
    status: int, headers: Headers, body: bytes, *, bare: bool = False, close: bool = False
) -> bytes:
    """The bytes of an answer. `bare`: without its body, as HEAD wants it."""
    lines = [_STATUS_LINES[status]]
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    if status not in _NO_BODY:
        lines.append(b"content-length: %d\r\n" % len(body))
    if close:
        lines.append(b"connection: close\r\n")
    head = _joined(lines, len(headers))
    return head if bare or status in _NO_BODY else head + body


def _joined(lines: list[bytes], headers: int) -> bytes:
    """The head. Raises RuntimeError if a value holds a line's end, which would begin another header."""
    lines.append(b"\r\n")
    head = b"".join(lines)
    # Status line, blank line, and at most two lines of ours beside the headers.
    if head.count(b"\n") > headers + 4:
        raise RuntimeError("a header of an answer holds a line's end")
    return head
