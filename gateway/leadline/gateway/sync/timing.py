"""How often Redis is read, and how long it is waited for."""

from dataclasses import dataclass

__all__ = ["SyncTiming"]


@dataclass(slots=True, frozen=True)
class SyncTiming:
    """Seconds, but for the count."""

    poll_seconds: float = 0.5
    eager_poll_seconds: float = 0.1
    """For a second after batches of an unknown epoch: some pod has just begun a new life."""
    timeout: float = 3.0
    """Of one reply, beyond the time it is meant to block."""
    max_backoff: float = 5.0
    max_reload_backoff: float = 8.0
    """Between two looks at the snapshot of a pod whose snapshot is not new enough."""
    read_count: int = 500
    """Stream entries a read."""
