"""Circuit breaker of one pod.

    closed ──`failures` in a row──▶ open ──after `seconds`──▶ half-open: one request may try
       ▲                             ▲                            │
       └────────── it succeeds ──────┼────────────────────────────┤
                                     └──── it fails: twice as long ┘

What counts as a failure: connect errors, timeouts, broken connections, 500, 502, 504 and a 503 that names no
time to come back. Never what a client can cause (4xx, row P12), nor a pod that says it is full (429, or 503
with Retry-After): that is load, not sickness.
"""

import time

from leadline.gateway.pods import Pod
from leadline.gateway.upstream.settings import ProxySettings

__all__ = ["CircuitBreaker", "breaker_of"]


class CircuitBreaker:
    """Satisfies `pods.Circuit`."""

    __slots__ = ("_limit", "_max_seconds", "_pause", "_seconds", "failures", "probing", "retry_at")

    def __init__(self, *, failures: int = 3, seconds: float = 1.0, max_seconds: float = 30.0) -> None:
        self._limit = failures
        self._seconds = seconds
        self._max_seconds = max_seconds
        self._pause = seconds
        self.failures = 0
        self.retry_at: float | None = None
        """When an open circuit may be tried; None: closed."""
        self.probing = False

    def allows(self, now: float) -> bool:
        return self.retry_at is None or (now >= self.retry_at and not self.probing)

    @property
    def state(self) -> str:
        if self.retry_at is None:
            return "closed"
        return "half_open" if self.probing or time.monotonic() >= self.retry_at else "open"

    def begin(self) -> None:
        """A request goes to the pod."""
        if self.retry_at is not None:
            self.probing = True

    def abandoned(self) -> None:
        """That request ended without a verdict (its client left)."""
        self.probing = False

    def succeeded(self) -> None:
        self.failures = 0
        if self.retry_at is not None:
            self.retry_at = None
            self.probing = False
            self._pause = self._seconds

    def hold(self) -> None:
        """Open at once, until `try_again`: the pod was seen to answer nothing at all."""
        self.retry_at = float("inf")
        self.probing = False

    def try_again(self, now: float) -> None:
        """A pod that was held back answers: half-open, if nothing else has closed the circuit meanwhile."""
        if self.retry_at is not None:
            self.retry_at = now

    def failed(self, now: float) -> bool:
        """Returns whether this opened the circuit."""
        self.failures += 1
        if self.retry_at is not None:
            if not self.probing:
                return False  # sent before the circuit opened; says nothing new
            self.probing = False
            self._pause = min(self._pause * 2, self._max_seconds)
        elif self.failures < self._limit:
            return False
        self.retry_at = now + self._pause
        return True


def breaker_of(pod: Pod, settings: ProxySettings) -> CircuitBreaker:
    """The pod's breaker; discovery makes pods without one."""
    circuit = pod.circuit
    if not isinstance(circuit, CircuitBreaker):
        circuit = pod.circuit = CircuitBreaker(
            failures=settings.breaker_failures,
            seconds=settings.breaker_seconds,
            max_seconds=settings.breaker_max_seconds,
        )
    return circuit
