"""Tallies against the library they stand in for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from leadline.gateway.metrics.tallies import CountTally, GaugeTally, HistogramTally

BOUNDS = (0.5, 1.0, 2.5)


@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 2.5, 3.0, 100.0]), max_size=9), max_size=9)
)
def test_a_histogram_shows_what_it_would_have_shown_without_a_tally(batches: list[list[float]]) -> None:
    registries = CollectorRegistry(), CollectorRegistry()
    tallied, plain = (
        Histogram("seconds", "…", ["service"], buckets=BOUNDS, registry=registry).labels("a")
        for registry in registries
    )
    tally = HistogramTally(tallied)
    for batch in batches:
        for value in batch:
            tally.observe(value)
            plain.observe(value)
        tally.flush()
    shown, wanted = (
        [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
        for registry in registries
    )
    assert shown == wanted


def test_counters_and_gauges_show_what_came_together_after_a_flush() -> None:
    registry = CollectorRegistry()
    counter, gauge = Counter("n", "…", registry=registry), Gauge("g", "…", registry=registry)
    count, level = CountTally(counter), GaugeTally(gauge)
    count.inc()
    count.inc(4)
    level.value += 3
    level.value -= 1
    assert registry.get_sample_value("n_total") == 0
    for _ in range(2):
        count.flush()
        level.flush()
        assert registry.get_sample_value("n_total") == 5
        assert registry.get_sample_value("g") == 2
