"""Settings of the proxy, made from the gateway's configuration (`app.proxy_settings`), which has the
defaults.

Seconds unless the name says otherwise."""

from dataclasses import dataclass
from typing import Literal

from leadline.protocol.http.settings import HttpSettings

__all__ = ["ProxySettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings(HttpSettings):
    connect_timeout: float
    first_byte_timeout: float
    """Of streams: from sending a request to the first byte of its answer, the pod's queue and the prefill
    included."""
    answer_timeout: float
    """The same of answers that are no streams: nothing of them comes before all is generated."""
    idle_timeout: float
    """Between two pieces of an answer."""
    probe_after: float = 1.0
    """A pod that is silent for this long is asked for /health: one that hangs is left at once, not after
    the timeouts above, which must allow for long prompts."""
    leave_after: float = 1.0
    """How long /health may be silent before a request without any answer yet goes to another pod."""
    hangs_after: float = 2.0
    """The same before a stream moves, and before the pod's circuit opens."""
    probe_timeout: float = 5.0
    """The same where no other pod can serve."""
    max_attempts: int
    """Pods tried for one request before its first byte."""
    migration: Literal["auto", "off"]
    """Streams continue on another pod when theirs dies. auto: where the pod is an engine of Leadline."""
    max_migrations: int
    migration_wait: float = 10.0
    """For a pod to go on with, when there is none."""
    breaker_failures: int
    """Failures in a row that open a pod's circuit."""
    breaker_seconds: float
    """How long it stays open at first; doubles up to breaker_max_seconds."""
    breaker_max_seconds: float
    access_log: bool
    drain_timeout: float
    """Time that running requests get after SIGTERM."""
