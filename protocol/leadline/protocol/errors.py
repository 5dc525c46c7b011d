"""Errors that several packages raise, and the error objects in which servers report them.

`RequestError` is the caller's mistake: it carries the HTTP status and the OpenAI fields, and its message says
what to change. `EngineError` is ours, the model's or the machine's.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "SHOULD_RETRY",
    "EngineError",
    "ErrorObject",
    "ErrorResponse",
    "LeadlineError",
    "ModelNotFound",
    "RequestError",
    "UnsupportedModel",
    "encode_error",
]


SHOULD_RETRY = "X-Should-Retry"
"""Header of an answer. `false`: the request fails on every pod, clients and gateways do not try again, and
the pod is not to blame. OpenAI's clients read it."""


class LeadlineError(Exception):
    """Root of everything we raise on purpose."""


class RequestError(LeadlineError):
    """A request that cannot be served as it stands.

    `status` is the HTTP status, `type`, `code` and `param` are the fields of the OpenAI error object.
    """

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class EngineError(LeadlineError):
    """The engine, its configuration, the model's files or the machine is at fault."""


class UnsupportedModel(EngineError):
    """A model whose files ask for something we do not implement; the message names it."""


class ModelNotFound(EngineError):
    """No model at that name or path."""


class ErrorObject(msgspec.Struct, kw_only=True, frozen=True):
    """What went wrong, and what the caller can do about it. The four fields are always present."""

    message: str
    type: str = "invalid_request_error"
    """invalid_request_error, authentication_error, permission_error, not_found_error, rate_limit_error or
    server_error."""
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
