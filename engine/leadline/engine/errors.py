"""Typed errors of the engine.

Two families. `RequestError` is the caller's mistake: it carries the HTTP status and the OpenAI error
fields, and its message says what to change. `EngineError` is ours or the machine's. Anything a caller can
cause raises the first kind; bare asserts are for broken invariants only.

The roots, and what reading a model's tokenizer can raise, live in `leadline.protocol.errors`: the gateway
raises them too.
"""

from __future__ import annotations

from leadline.protocol.errors import (
    EngineError,
    LeadlineError,
    ModelNotFound,
    RequestError,
    UnsupportedModel,
)

__all__ = [
    "ConfigError",
    "DeadlineExceeded",
    "EngineDead",
    "EngineError",
    "LeadlineError",
    "ModelNotFound",
    "ModelUnreachable",
    "OutOfMemory",
    "QueueFull",
    "QueueTimeout",
    "RequestError",
    "StructuredOutputFailed",
    "Unauthorized",
    "UnsupportedModel",
    "WrongTask",
]


class QueueFull(RequestError):
    """More requests wait than `max_queued_requests` allows."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message, code="queue_full")
        self.retry_after = retry_after


class QueueTimeout(RequestError):
    """The request waited longer than its queue timeout."""

    status = 503
    type = "server_error"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message, code="queue_timeout")
        self.retry_after = retry_after


class DeadlineExceeded(RequestError):
    """The request's deadline passed before it finished."""

    status = 504
    type = "server_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="deadline_exceeded")


class StructuredOutputFailed(RequestError):
    """The grammar of a structured output failed in the middle of it: what came so far is no answer."""

    status = 500
    type = "server_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="structured_output_failed")


class WrongTask(RequestError):
    """The model is served for another task: it generates, embeds or reranks."""

    status = 404
    type = "not_found_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="model", code="task_not_served")


class ConfigError(EngineError):
    """A setting that cannot work; the message names it and a value that would."""


class ModelUnreachable(EngineError):
    """The hub does not answer, or not now: no network, no such host, a time-out, HTTP 5xx or 429. Whether it
    has the model is not known; the same call may succeed later."""


class Unauthorized(EngineError):
    """The hub refused the token, or the model is gated and no token was given."""


class OutOfMemory(EngineError):
    """Weights, activations or the KV cache do not fit; the message names the settings and what would fit."""


class EngineDead(EngineError):
    """The engine core has stopped; the request cannot be served by this process."""
