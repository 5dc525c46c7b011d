"""Requests out of a client's bytes, as httptools finds them, each an Exchange from its head on.

Owns the part of a request that has arrived, the limit of its head, and the refusal of what is no HTTP;
which request is answered when, and how long each may take, is server_protocol.py's.
"""

from abc import ABC, abstractmethod

import httptools

from leadline.protocol.errors import RequestError
from leadline.protocol.http.client_socket import ClientSocket
from leadline.protocol.http.exchange import Exchange, path_of
from leadline.protocol.http.settings import HttpSettings

__all__ = ["RequestReader"]

_HIGH_WATER = 256 << 10
"""Bytes buffered without a reader (of a body, or behind a waiting request) before reading is paused."""
_UPGRADE = frozenset((b"connection", b"upgrade", b"http2-settings"))


class _HeadTooLong(RequestError):
    status = 431


class _BadRequest(RequestError):
    status = 400


class RequestReader(ClientSocket, ABC):
    """The half of a connection that reads. The subclass answers the requests."""

    __slots__ = (
        "_deaf",
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
        """While a request waits behind the running one: bytes behind it. They are not parsed, but read, since
        only who reads notices that a client leaves."""
        self._open = False
        """Of a request some bytes have come, and some are missing."""
        self._incoming: Exchange | None = None
        """The request whose body is being read."""
        self._deaf = False
        """Nothing that comes is of interest any more."""
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
        if self._deaf:
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
