"""What a RedisSync has done so far: for tests, and for whoever looks into a running gateway."""

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["SyncCounts"]


@dataclass(slots=True)
class SyncCounts:
    """Totals since the start, and two gauges. Gaps are counted by the index (`ServiceIndex.gaps`)."""

    events: Counter[str] = field(default_factory=Counter)
    """Batches read, by what became of them: the values of `Outcome`, and "garbage"."""
    reloads: Counter[str] = field(default_factory=Counter)
    """Snapshots asked for, likewise; "absent" when there was none."""
    heartbeats: int = 0
    failures: int = 0
    """Times the connection was lost or could not be made."""
    connected: bool = False
    lag_seconds: float = 0.0
    """From a batch's entering the stream (Redis's clock) to its being read (ours); 0 when all is read."""
