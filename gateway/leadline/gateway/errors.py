"""Errors of the gateway: answers to clients, and mistakes in its configuration.

Every `RequestError` here has the HTTP `status`, the OpenAI fields `type`, `code` and `param`, and a
`retry_after` in seconds (None: trying again will not help).
"""

from leadline.protocol.errors import LeadlineError, RequestError

__all__ = [
    "ConfigError",
    "DeadlinePassed",
    "GatewayRefusal",
    "InvalidKey",
    "ModelForbidden",
    "NoPods",
    "QueueFull",
    "QueueTimeout",
    "RateLimited",
    "UnknownModel",
    "no_tokenizer",
    "shutting_down",
    "unknown_model",
]


class ConfigError(LeadlineError):
    """A setting or file that cannot work; the message names the place and what would work."""


class GatewayRefusal(RequestError):
    """Common part: `retry_after` and extra answer headers."""

    retry_after: float | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.retry_after = retry_after
        self.headers = headers or {}
        """To be sent with the answer: X-RateLimit-*, WWW-Authenticate."""


class UnknownModel(GatewayRefusal):
    """No service serves that name."""

    status = 404
    type = "not_found_error"


class InvalidKey(GatewayRefusal):
    """No key, or one we do not know."""

    status = 401
    type = "authentication_error"


class ModelForbidden(GatewayRefusal):
    """The key may not use this model."""

    status = 403
    type = "permission_error"


class RateLimited(GatewayRefusal):
    """The key's requests or tokens a minute are used up."""

    status = 429
    type = "rate_limit_error"


class QueueFull(GatewayRefusal):
    """More requests wait for a pod than may."""

    status = 429
    type = "rate_limit_error"


class QueueTimeout(GatewayRefusal):
    """No pod had free capacity in time."""

    status = 503
    type = "server_error"


class NoPods(GatewayRefusal):
    """The service has no pod that takes requests."""

    status = 503
    type = "server_error"


class DeadlinePassed(GatewayRefusal):
    """The request's own deadline passed while it waited."""

    status = 504
    type = "server_error"


def unknown_model(name: str) -> UnknownModel:
    """For a name that leads nowhere."""
    shown = name if len(name) <= 100 else name[:100] + "…"
    return UnknownModel(
        f"the model {shown!r} does not exist here; GET /v1/models lists what does",
        param="model",
        code="model_not_found",
    )


def no_tokenizer(service: str) -> UnknownModel:
    """For what takes the model's tokenizer, where the gateway has none."""
    return UnknownModel(
        f"the gateway has no tokenizer of {service}: /v1/models says why in prefix_matching.reason",
        code="no_tokenizer",
    )


def shutting_down() -> NoPods:
    """For requests that a stopping gateway cannot finish."""
    return NoPods("the gateway is shutting down", code="draining", retry_after=1)
