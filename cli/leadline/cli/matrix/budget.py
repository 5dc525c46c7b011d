"""Time for several things, one after the other."""

from __future__ import annotations

import math
import time

__all__ = ["Budget"]


class Budget:
    """Shares what is left of the time evenly among what is left to do."""

    def __init__(self, seconds: float | None, parts: int) -> None:
        """`seconds` from now on; None: as long as it takes."""
        self._ends = math.inf if seconds is None else time.monotonic() + seconds
        self._parts = parts

    def end_of_share(self) -> float:
        """When the part that begins now should be done, on the monotonic clock; in the past when the time is
        over."""
        now, parts = time.monotonic(), max(1, self._parts)
        self._parts -= 1
        return self._ends if now > self._ends else now + (self._ends - now) / parts
