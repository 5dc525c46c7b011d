"""Metrics of several API processes as those of one server: what each counted, added up.

Only what is counted where requests pass crosses between processes (counters and histograms, which add up);
the core's own figures are in one place already.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["Added", "Family", "TokenMeter", "added", "snapshot"]


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


class Family(msgspec.Struct, frozen=True, array_like=True):
    """One metric with all its series at a moment."""

    name: str
    documentation: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]


def snapshot(registry: CollectorRegistry) -> list[Family]:
    """Of a registry that holds counters and histograms alone."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [(sample.name, dict(sample.labels), float(sample.value)) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


def added(parts: Iterable[list[Family]]) -> list[Family]:
    """Series of the same name and labels summed up; order as they are first met."""
    families: dict[str, Family] = {}
    series: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for part in parts:
        for family in part:
            families.setdefault(family.name, family)
            values = series.setdefault(family.name, {})
            for name, labels, value in family.samples:
                key = (name, tuple(labels.items()))
                values[key] = values.get(key, 0.0) + value
    return [
        Family(
            family.name,
            family.documentation,
            family.type,
            [(sample, dict(labels), value) for (sample, labels), value in series[family.name].items()],
        )
        for family in families.values()
    ]


class Added(Collector):
    """Families as prometheus_client wants them."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.documentation, family.type)
            for name, labels, value in family.samples:
                metric.add_sample(name, labels, value)
            yield metric
