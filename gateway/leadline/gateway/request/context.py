"""One client request while it is served: its input, the decisions about it, and the counts that are closed
once."""

import time
from collections.abc import Awaitable, Callable

import msgspec

from leadline.gateway.metrics.metrics import ServiceMetrics
from leadline.gateway.policies.base import Decision
from leadline.gateway.request.body import Incoming
from leadline.gateway.request.dialects import Dialect
from leadline.gateway.request.prompt import RoutedPrompt
from leadline.gateway.services import Service
from leadline.protocol.openai.common import Usage

__all__ = ["Call"]

Headers = list[tuple[bytes, bytes]]


class Call(msgspec.Struct, eq=False, kw_only=True):
    path: bytes
    dialect: Dialect
    headers: Headers
    client: str | None
    incoming: Incoming
    service: Service
    metrics: ServiceMetrics
    prompt: RoutedPrompt
    arrived: float
    """Monotonic seconds."""
    explain: bool = False
    deadline: float | None = None
    queue_timeout: float | None = None
    """What is left of the client's `queue_timeout`, where some of it was spent waiting here."""
    batch: bool = False
    """The key is of class batch, and the body does not say so."""
    seed: int | None = None
    """Given to streams that may move, where the client gave none."""
    identity: dict[str, object] = msgspec.field(default_factory=dict)
    """Further fields for streams that may move: id and time of the answer, where its API needs them."""
    keep: Callable[[bytes], Awaitable[None]] | None = None
    """Stores the answer, which is JSON, before the client has all of it."""
    extra_headers: Headers = msgspec.field(default_factory=list)
    """For the answer: X-Request-ID, X-RateLimit-*."""

    decision: Decision | None = None
    picking_seconds: float = 0.0
    """Time that matching and policies took."""
    attempts: int = 0
    migrations: int = 0
    predicted: int = 0
    """Prompt tokens that the pod which answered was believed to hold."""
    status: int = 0
    """As the client got it; 499: it left."""
    delivered: bool = False
    """The client has left, with all of a stream to its [DONE]: the request did not fail."""
    first_byte_at: float = 0.0
    last_byte_at: float = 0.0
    usage: Usage | None = None
    events: int = 0
    """Events of a stream that were passed on."""
    output: int = 0
    """Tokens of a stream that were passed on, as far as the usage is not known (yet)."""

    @property
    def total_tokens(self) -> int | None:
        """Tokens of prompt and output; None: the output is unknown."""
        if self.usage is not None:
            return self.usage.total_tokens
        return self.prompt.tokens + self.output if self.output else None

    def piece(self) -> None:
        """Output goes to the client of a stream."""
        now = time.monotonic()
        if self.first_byte_at:
            self.metrics.itl.observe(now - self.last_byte_at)
        else:
            self.first_byte_at = now
            self.metrics.ttft.observe(now - self.arrived)
        self.last_byte_at = now

    def close(self) -> None:
        """Count the request; called once, whatever happened."""
        metrics = self.metrics
        metrics.over()
        metrics.ended(self.status)
        metrics.seconds.observe(time.monotonic() - self.arrived)
        usage = self.usage
        if usage is not None:
            metrics.prompt.inc(usage.prompt_tokens)
            metrics.output.inc(usage.completion_tokens)
            if usage.prompt_tokens_details is not None:
                metrics.predicted.inc(min(self.predicted, usage.prompt_tokens))
                metrics.actual.inc(usage.prompt_tokens_details.cached_tokens)
        elif self.output:
            metrics.prompt.inc(self.prompt.tokens)
            metrics.output.inc(self.output)
