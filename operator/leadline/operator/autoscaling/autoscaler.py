"""How many replicas a service with `autoscaling` should have, from its requests in flight.

Pure; time is handed in. As the HorizontalPodAutoscaler does it (its algorithm page in the
Kubernetes documentation), in short:

    wanted = ceil(requests in flight / targetConcurrency), within min and max
    within 10 % of the target: stay
    up: at once, but at most to twice as many (or two more)
    down: to the most that was wanted within the last five minutes
    what is not known counts as nothing when scaling up and as its most when scaling down; if nothing is
    known, stay (P23)
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from leadline.operator.autoscaling.demand import Demand

__all__ = ["Scaler", "wanted_replicas"]

_TOLERANCE = 0.1
_STABILIZE_SECONDS = 300.0


def wanted_replicas(demand: Demand | None, target: int, current: int) -> int | None:
    """What the demand asks for, without limits; None: no ground to decide on."""
    if demand is None:
        return None
    needed = math.ceil(demand.low / target)
    if needed < current and demand.high > demand.low:
        if demand.high >= current * target:
            return current
        needed = math.ceil(demand.high / target)
    if current and abs(demand.low / (target * current) - 1) <= _TOLERANCE:
        return current
    return needed


@dataclass(slots=True)
class Scaler:
    """Remembers what one service wanted, so that a pause between requests does not cost it its pods."""

    _wanted: deque[tuple[float, int]] = field(default_factory=deque)
    """(time, wanted), of the last five minutes."""

    def decide(
        self,
        demand: Demand | None,
        *,
        target: int,
        minimum: int,
        maximum: int,
        current: int,
        now: float,
    ) -> int:
        """The replicas there should be now."""
        bounded = min(max(current, minimum), maximum)
        wanted = wanted_replicas(demand, target, current)
        if wanted is None:
            return bounded
        wanted = min(max(wanted, minimum), maximum)
        while self._wanted and now - self._wanted[0][0] > _STABILIZE_SECONDS:
            self._wanted.popleft()
        if not self._wanted:
            # Just begun: what there is was wanted, as far as anybody knows.
            self._wanted.append((now, bounded))
        self._wanted.append((now, wanted))
        if wanted > current:
            return max(minimum, min(wanted, max(2 * current, current + 2)))
        return min(bounded, max(most for _, most in self._wanted))
