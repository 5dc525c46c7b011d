"""The arithmetic of a sliding minute from two counters, and such counters for this process alone.

Pure: times are given by the caller. Usage within the last minute is estimated from
the count of this clock minute and of the one before, as if that one had been even:

    minute n-1        │ minute n
    ........previous..│..current..▲
          ◄───────────┴───────────┤ the last 60 s        used = previous · (1 - phase) + current
                       ◄─ phase ──┘ (0 … 1)

Two numbers a key, however high the limit, and a burst at the edge of a minute cannot use two minutes' worth.
"""

from dataclasses import dataclass

__all__ = ["MINUTE", "LocalWindows", "Usage", "wait_for", "wait_until_empty"]

MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Usage:
    """What one limit has seen. All counts are ≥ 0."""

    previous: int
    current: int
    phase: float
    """How much of the current minute is over: 0 … 1."""

    @property
    def used(self) -> float:
        return self.previous * (1.0 - self.phase) + self.current

    def fits(self, cost: int, limit: int) -> bool:
        """Whether `cost` more stay within the limit; a limit of 0 is none."""
        return not limit or self.used + cost <= limit + 1e-9


def wait_for(usage: Usage, cost: int, limit: int) -> float | None:
    """Return the seconds until `cost` more fit if no other request takes anything; None: they never will."""
    if cost > limit:
        return None
    if usage.fits(cost, limit):
        return 0.0
    left = limit - cost
    if usage.current <= left:
        # Within this minute, by what the last one loses: previous · (1 - phase) ≤ left - current.
        return (1.0 - (left - usage.current) / usage.previous - usage.phase) * MINUTE
    # Only in the next one, where current is what previous is now: current · (1 - phase) ≤ left.
    return (1.0 - usage.phase + 1.0 - left / usage.current) * MINUTE


def wait_until_empty(usage: Usage) -> float:
    """Seconds until the whole limit is there again."""
    if usage.current:
        return (2.0 - usage.phase) * MINUTE
    return (1.0 - usage.phase) * MINUTE if usage.previous else 0.0


class _Counters:
    __slots__ = ("minute", "requests", "requests_before", "tokens", "tokens_before")

    def __init__(self, minute: int) -> None:
        self.minute = minute
        self.requests = self.requests_before = 0
        self.tokens = self.tokens_before = 0

    def roll(self, minute: int) -> None:
        if minute > self.minute:
            fresh = minute == self.minute + 1
            self.requests_before = self.requests if fresh else 0
            self.tokens_before = self.tokens if fresh else 0
            self.requests = self.tokens = 0
            self.minute = minute


class LocalWindows:
    """Counters by key name, of what this process has let through."""

    __slots__ = ("_counters",)

    def __init__(self) -> None:
        self._counters: dict[str, _Counters] = {}

    def usage(self, name: str, now: float) -> tuple[Usage, Usage]:
        """(requests, tokens)."""
        counters = self._rolled(name, now)
        phase = now / MINUTE % 1.0
        return (
            Usage(counters.requests_before, counters.requests, phase),
            Usage(counters.tokens_before, counters.tokens, phase),
        )

    def add(self, name: str, now: float, requests: int, tokens: int) -> None:
        """Count; negative tokens take back what was counted too much, at most what is there."""
        counters = self._rolled(name, now)
        counters.requests += requests
        counters.tokens += tokens
        if counters.tokens < 0:
            counters.tokens_before = max(0, counters.tokens_before + counters.tokens)
            counters.tokens = 0

    def _rolled(self, name: str, now: float) -> _Counters:
        minute = int(now // MINUTE)
        counters = self._counters.get(name)
        if counters is None:
            counters = self._counters[name] = _Counters(minute)
        counters.roll(minute)
        return counters
