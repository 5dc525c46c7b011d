"""Counts kept in plain numbers and passed to Prometheus at intervals.

Each sample of the client library takes a lock, and with several workers packs a number into a
mapped file: ten of them cost a small request as much as its JSON. So the hot path adds to a tally, and
`flush` passes the sum on (metrics.py calls it). One event loop, no locks.
"""

from bisect import bisect_left

from prometheus_client import Counter, Gauge, Histogram

__all__ = ["CountTally", "GaugeTally", "HistogramTally"]


class CountTally:
    """A counter, or one child of it."""

    __slots__ = ("_counter", "_pending")

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._pending = 0

    def inc(self, amount: int = 1) -> None:
        self._pending += amount

    def flush(self) -> None:
        if self._pending:
            self._counter.inc(self._pending)
            self._pending = 0


class GaugeTally:
    """A gauge that goes up and down."""

    __slots__ = ("_gauge", "_shown", "value")

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._shown = self.value = 0

    def flush(self) -> None:
        if self.value != self._shown:
            self._shown = self.value
            self._gauge.set(self.value)


class HistogramTally:
    """A histogram, or one child of it. The library takes one observation at a time only, so this adds to its
    buckets and its sum; a test holds it to what `observe` does."""

    __slots__ = ("_bounds", "_counts", "_histogram", "_sum")

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._bounds: list[float] = histogram._upper_bounds  # the last one is infinity
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def flush(self) -> None:
        if not any(self._counts):
            return
        histogram = self._histogram
        for bucket, count in zip(histogram._buckets, self._counts, strict=True):
            if count:
                bucket.inc(count)
        histogram._sum.inc(self._sum)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
