"""Errors in Anthropic's shape.

Types follow the status, so that every error has one of those that clients know. Where the server has no free
capacity, or has no pod or engine that serves, the status is 529, with which Anthropic's clients try again.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["ErrorAnswer", "ErrorDetail", "ErrorEvent", "encode_error", "status_of"]

OVERLOADED = 529

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
_FULL = frozenset(("queue_full",))
"""Codes of a 429 that no limit of the client's key causes."""


class ErrorDetail(msgspec.Struct, kw_only=True, frozen=True):
    type: str
    """invalid_request_error, authentication_error, permission_error, not_found_error, rate_limit_error,
    timeout_error, overloaded_error or api_error."""
    message: str
    """Begins with the field at fault, if there is one."""


class ErrorAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """Body of every answer with status 4xx or 5xx."""

    type: Literal["error"] = "error"
    error: ErrorDetail
    request_id: str | None = None


class ErrorEvent(msgspec.Struct, tag_field="type", tag="error", kw_only=True, frozen=True):
    """The event that ends a stream that cannot go on."""

    error: ErrorDetail

    @classmethod
    def of(cls, status: int, message: str, code: str | int | None = None) -> ErrorEvent:
        return cls(error=_object(status_of(status, code), message))


_encode = msgspec.json.Encoder().encode


def status_of(status: int, code: str | int | None) -> int:
    """Return the status of this API for a status of the others."""
    return OVERLOADED if status == 503 or (status == 429 and code in _FULL) else status


def encode_error(status: int, message: str, request_id: str | None = None) -> bytes:
    """Return the JSON text of an ErrorAnswer. `status` is one of this API."""
    return _encode(ErrorAnswer(error=_object(status, message), request_id=request_id))


def _object(status: int, message: str) -> ErrorDetail:
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return ErrorDetail(type=kind, message=message)
