"""What a service's reader of Redis has done so far, and the metrics of it."""

import os
from collections import Counter
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Gauge

__all__ = ["SyncCounts", "SyncMetric"]


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


class SyncMetric:
    """By service, and by worker the worse; of gateways with a Redis only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._connected = Gauge(
            "leadline_gateway_redis_connected",
            "1: cache events are read from Redis; 0: it is away, and routing goes by what was known",
            ["service"],
            registry=registry,
            multiprocess_mode="livemin",
        )
        self._lag = Gauge(
            "leadline_gateway_event_lag_seconds",
            "Age of a cache event when it is read, by the clocks of Redis and gateway; 0: all are read",
            ["service"],
            registry=registry,
            multiprocess_mode="livemax",
        )

    def show(self, service: str, counts: SyncCounts) -> None:
        self._connected.labels(service).set(int(counts.connected))
        self._lag.labels(service).set(max(0.0, counts.lag_seconds))

    def forget(self, service: str) -> None:
        """The service is gone: no alert may go on for it."""
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # where series stay until the process ends
            self._connected.labels(service).set(1)
            self._lag.labels(service).set(0)
        else:
            self._connected.remove(service)
            self._lag.remove(service)
