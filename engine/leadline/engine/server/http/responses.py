"""Bodies in, responses out: everything of the server that knows HTTP but no model.

Bodies are decoded by msgspec straight into the protocol's types; what a client can get wrong becomes an
`ApiError` (an OpenAI-shaped error with its status). A client that leaves cancels the handler
(`leadline.protocol.http`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from leadline.engine.errors import EngineDead, RequestError, StructuredOutputFailed
from leadline.engine.server.http.socket_writer import SocketWriter
from leadline.protocol.errors import SHOULD_RETRY, encode_error
from leadline.protocol.http.answers import error_body
from leadline.protocol.http.exchange import ClientGone, too_large
from leadline.protocol.openai import InvalidBody, decode_body

__all__ = [
    "ApiError",
    "ClientGone",
    "EventStream",
    "JSONBytes",
    "api_error",
    "error_response",
    "read_body",
    "sse",
]

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> bytes:
        """Return the error in OpenAI's shape."""
        return encode_error(self.message, type=self.type, param=self.param, code=self.code)


class JSONBytes(Response):
    """A JSON answer encoded by msgspec."""

    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200, headers: dict[str, str] | None = None) -> None:
        super().__init__(_encode(content), status_code, headers)


def api_error(error: BaseException) -> ApiError:
    """Translate what the engine raises into an answer. Anything unknown is ours: 500 without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        headers = {}
        retry_after = getattr(error, "retry_after", None)
        if retry_after is not None:
            headers["Retry-After"] = str(max(1, round(retry_after)))
        if isinstance(error, StructuredOutputFailed):
            headers[SHOULD_RETRY] = "false"
        return ApiError(
            error.status, error.message, type=error.type, param=error.param, code=error.code, headers=headers
        )
    if isinstance(error, EngineDead):
        return ApiError(
            503, str(error), type="server_error", code="engine_dead", headers={"Retry-After": "5"}
        )
    return ApiError(
        500, "internal error; the server's log says more", type="server_error", code="internal_error"
    )


def error_response(error: ApiError, request: Request) -> Response:
    """Return the answer to `request`, in the shape of its path's API."""
    status, body = error_body(
        request.url.path,
        error.status,
        error.message,
        type=error.type,
        param=error.param,
        code=error.code,
        request_id=request.headers.get("x-request-id"),
    )
    return Response(body, status, error.headers, media_type="application/json")


async def read_body(request: Request, kind: type[T], limit: int) -> T:
    """Read at most `limit` bytes and decode them. Raises ApiError 413, or 400 naming the field at fault."""
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ClientGone from None
    if len(body) > limit:
        raise too_large(limit)
    try:
        return decode_body(body, kind)
    except InvalidBody as error:
        raise ApiError(400, error.message, param=error.param, code="invalid_body") from None


def sse(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + (data if isinstance(data, bytes) else _encode(data)) + b"\n\n"


class EventStream(Response):
    """A server-sent event stream. Each item goes out in a write of its own, at once; the items' generator
    is closed when the client leaves, which is how a request is aborted. `socket` is open while the items'
    generator is waited for: what goes through it lies between two items."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], socket: SocketWriter, headers: dict[str, str]
    ) -> None:
        self._events = events
        self._socket = socket
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                self._socket.connect(scope)
            self._socket.close()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._socket.close()
            await self._events.aclose()
