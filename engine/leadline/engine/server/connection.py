"""A client's HTTP/1.1 connection: uvicorn's, and what clients and proxies need beyond it.

Owns four things. A wish to upgrade is declined by going on without (RFC 9110 section 7.8): Java's HTTP client
sends one for HTTP/2 with every request. What is no HTTP is refused in the OpenAI shape. Every answer, whoever
makes it, has an `X-Request-ID`. A client that leaves ends the request that runs, also where others had been
sent behind it. Streams to HTTP/1.0 are `outlet`'s matter.
"""

from __future__ import annotations

import itertools
import logging
import re
import secrets
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from leadline.protocol.errors import encode_error

__all__ = ["REQUEST_ID", "Connection"]

logger = logging.getLogger("leadline.engine.server")

REQUEST_ID = "leadline.request_id"
"""Where the scope of a request has its id."""

_FIT = re.compile(rb"[!-~]{1,128}").fullmatch
"""Visible ASCII, so that it can stand in any header and any log: the gateway's rule."""
_PREFIX = secrets.token_hex(8).encode()
_numbers = itertools.count(1)

_UPGRADE = (b"connection", b"upgrade", b"http2-settings")


class Connection(HttpToolsProtocol):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._unanswered: list[RequestResponseCycle] = []
        """The one that runs, and those that came behind it."""

    # asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(f"this is not a valid HTTP request: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    # uvicorn's hooks

    def _should_upgrade(self) -> bool:
        return True  # makes nothing of a request with such a wish until `_decline_upgrade` has dropped it

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        name = next((value for key, value in self.headers if key == b"x-request-id"), b"")
        if not _FIT(name):
            name = b"%s-%x" % (_PREFIX, next(_numbers))
        self.scope[REQUEST_ID] = name.decode()  # type: ignore[literal-required]
        super().on_headers_complete()  # whose task for the request has not begun yet
        cycle = self.cycle
        cycle.default_headers = [*cycle.default_headers, (b"x-request-id", name)]
        self._unanswered = [one for one in self._unanswered if not one.response_complete] + [cycle]

    # inside

    def _decline_upgrade(self, rest: bytes) -> None:
        """The parser takes no body behind a wish to upgrade: it gets the same request without one."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse("CONNECT is for proxies")
            return
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % pair for pair in self.headers if pair[0] not in _UPGRADE]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _refuse(self, message: str) -> None:
        logger.info("%s", message)
        body = encode_error(message, type="invalid_request_error", code="invalid_http")
        lines = [b"%s: %s" % pair for pair in self.server_state.default_headers]
        lines += [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close"]
        self.transport.write(STATUS_LINE[400] + b"\r\n".join(lines) + b"\r\n\r\n" + body)
        self.transport.close()
