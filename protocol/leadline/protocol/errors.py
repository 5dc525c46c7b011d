"""The OpenAI error object: the one shape in which the engine's server and the gateway report failures."""

from __future__ import annotations

import msgspec

__all__ = ["ErrorObject", "ErrorResponse", "encode_error"]


class ErrorObject(msgspec.Struct, kw_only=True, frozen=True):
    """What went wrong, and what the caller can do about it. The four fields are always present."""

    message: str
    type: str = "invalid_request_error"
    """invalid_request_error, authentication_error, not_found_error, rate_limit_error or server_error."""
    param: str | None = None
    """The request field at fault, as a path: `messages[0].content`."""
    code: str | int | None = None


class ErrorResponse(msgspec.Struct, kw_only=True, frozen=True):
    """Body of every answer with status 4xx or 5xx, and payload of an SSE event that ends a stream early."""

    error: ErrorObject


_encode = msgspec.json.Encoder().encode


def encode_error(
    message: str,
    *,
    type: str = "invalid_request_error",
    param: str | None = None,
    code: str | int | None = None,
) -> bytes:
    """The JSON text of an ErrorResponse."""
    return _encode(ErrorResponse(error=ErrorObject(message=message, type=type, param=param, code=code)))
