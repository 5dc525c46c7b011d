"""The two metrics that every token moves, counted without locks.

prometheus_client's counters take a lock and a chain of calls each time, which a server that streams tens of
thousands of tokens a second feels. Written and read in the event loop's thread alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["TokenMeter"]


class TokenMeter(Collector):
    """Metrics `leadline_engine_generation_tokens` and `leadline_engine_inter_token_latency_seconds`."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: upper bounds of the histogram's buckets in seconds, rising, without infinity."""
        self.tokens = 0
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._seconds = 0.0

    def gap(self, seconds: float) -> None:
        """Time between two tokens of one choice. A bound belongs to its bucket (`le`)."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._seconds += seconds

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("leadline_engine_generation_tokens", "Tokens generated.", value=self.tokens)
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        yield HistogramMetricFamily(
            "leadline_engine_inter_token_latency_seconds",
            "Time between two tokens of one choice.",
            buckets=list(zip(names, accumulate(self._counts), strict=True)),
            sum_value=self._seconds,
        )
