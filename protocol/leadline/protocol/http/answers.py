"""Errors as HTTP answers in the shape of each API, and the errors that a server itself gives."""

from leadline.protocol.anthropic import errors as anthropic
from leadline.protocol.errors import RequestError, encode_error

__all__ = ["InternalError", "ShuttingDown", "answer_to", "error_body"]

Headers = list[tuple[bytes, bytes]]

_MESSAGES = "/v1/messages"
"""The path of Anthropic's API."""


class InternalError(RequestError):
    """Our mistake; the log has the details."""

    status = 500
    type = "server_error"

    def __init__(self) -> None:
        super().__init__("internal error; the server's log says more", code="internal_error")


class ShuttingDown(RequestError):
    """The server stops and cannot finish the request."""

    status = 503
    type = "server_error"
    retry_after = 1

    def __init__(self) -> None:
        super().__init__("the server is shutting down", code="draining")


def answer_to(
    error: RequestError, path: str = "", request_id: bytes | None = None
) -> tuple[int, Headers, bytes]:
    """Return status, headers and body for `error` on `path`, in the shape of that path's API. `retry_after`
    (seconds) and `headers` of the error, where it has them, become headers of the answer."""
    headers = [(b"content-type", b"application/json")]
    retry_after: float | None = getattr(error, "retry_after", None)
    if retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, round(retry_after))))
    more: dict[str, str] = getattr(error, "headers", {})
    headers += [(name.lower().encode(), value.encode()) for name, value in more.items()]
    status, body = error_body(
        path,
        error.status,
        error.message,
        type=error.type,
        param=error.param,
        code=error.code,
        request_id=None if request_id is None else request_id.decode("ascii"),
    )
    return status, headers, body


def error_body(
    path: str,
    status: int,
    message: str,
    *,
    type: str = "invalid_request_error",
    param: str | None = None,
    code: str | int | None = None,
    request_id: str | None = None,
) -> tuple[int, bytes]:
    """Return the status and the body of an error on `path`, in the shape of that path's API."""
    if path.startswith(_MESSAGES) and path[len(_MESSAGES) :][:1] in ("", "/"):
        status = anthropic.status_of(status, code)
        return status, anthropic.encode_error(status, message, request_id)
    return status, encode_error(message, type=type, param=param, code=code)
