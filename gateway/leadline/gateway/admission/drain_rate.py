"""How fast a queue moves, and so when it is worth trying again.

Room: gateway/admission. Pure: times are monotonic seconds given by the caller.
"""

import math
from collections import deque

__all__ = ["DrainRate"]

_SAMPLES = 64
_LONGEST = 60.0


class DrainRate:
    """Rate of requests let in, over the last 64 of them or `window` seconds, whichever is shorter."""

    __slots__ = ("_times", "_window")

    def __init__(self, window: float = 30.0) -> None:
        self._times: deque[float] = deque(maxlen=_SAMPLES)
        self._window = window

    def one(self, now: float) -> None:
        """A request was let in."""
        self._times.append(now)

    def per_second(self, now: float) -> float:
        """0 when nothing was let in lately."""
        times = self._times
        while times and now - times[0] > self._window:
            times.popleft()
        # The time since the last one counts as well: a queue that stands still gets slower by the second.
        return len(times) / max(now - times[0], 0.001) if len(times) > 1 else 0.0

    def retry_after(self, ahead: int, now: float) -> float:
        """Whole seconds until about `ahead` requests have been let in, from 1 to 60. With no rate to go by:
        1 for an empty queue, and more the longer it is."""
        rate = self.per_second(now)
        seconds = ahead / rate if rate else 1.0 + math.log2(1 + ahead)
        return float(min(_LONGEST, max(1.0, math.ceil(seconds))))
