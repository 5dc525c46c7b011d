"""How long a service has had no request, as far as all replicas of the gateway know.

Pure; time is handed in. A request that came and went between two looks shows in the number of answered
requests. A replica of the gateway that restarts begins to count at zero: that is a change too, so the time
begins again rather than being too long.
"""

from __future__ import annotations

from dataclasses import dataclass

from leadline.operator.autoscaling.demand import Demand

__all__ = ["Idleness"]


@dataclass(slots=True)
class Idleness:
    """Remembers the last sign of a request for one service."""

    _since: float | None = None
    _ended: float = 0.0

    def seconds(self, demand: Demand | None, now: float) -> float:
        """Seconds without a request up to `now` (monotonic seconds); 0 while not every replica of the gateway
        has answered."""
        idle = demand is not None and demand.high == 0
        if demand is None or not idle or demand.ended != self._ended or self._since is None:
            self._since = now
        if demand is not None:
            self._ended = demand.ended
        return now - self._since
