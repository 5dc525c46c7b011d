"""Deadlines of many connections under one timer.

Nearly every wait ends long before its deadline, so setting one must cost next to nothing: a timer of the
event loop for each costs as much as parsing a small request.

    set(a, 5.0), set(b, 5.1), set(a, 9.0)      a dictionary entry each; the timer stays at 5.0
    at 5.0                                      nothing is due; the timer is set to the earliest, 5.1

Deadlines are not cancelled one by one: a callback that runs late checks whether it still applies.
"""

import asyncio
import time
from typing import Protocol

__all__ = ["Deadlines", "Expiring"]

_PAUSE = 0.005
"""Seconds between two looks at least: each costs time in proportion to the entries."""


class Expiring(Protocol):
    """What can have a deadline."""

    def expired(self) -> None:
        """The last deadline set has passed. Must not raise."""
        ...


class Deadlines:
    """One an event loop; times are `time.monotonic()`."""

    __slots__ = ("_next", "_timer", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[Expiring, float] = {}
        self._next = float("inf")
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def set(self, who: Expiring, when: float) -> None:
        """Replaces the deadline that `who` had."""
        self._waiting[who] = when
        if when < self._next:
            self._arm(when)

    def forget(self, who: Expiring) -> None:
        self._waiting.pop(who, None)

    def close(self) -> None:
        """No callback runs any more."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next = when
        delay = max(_PAUSE, when - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay, self._look)

    def _look(self) -> None:
        self._timer = None
        self._next = float("inf")
        now = time.monotonic()
        due = [who for who, when in self._waiting.items() if when <= now]
        for who in due:
            del self._waiting[who]
        for who in due:
            who.expired()
        if self._waiting:
            earliest = min(self._waiting.values())
            if earliest < self._next:
                self._arm(earliest)
