"""How many replicas: ups at once, downs late, and holding on when nothing is known."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.operator.autoscaler import Scaler, wanted_replicas
from leadline.operator.progress import parse_in_flight


@pytest.mark.parametrize(
    ("loads", "current", "wanted"),
    [
        ([10.0], 1, 1),
        ([10.9], 1, 1),
        ([12.0], 1, 2),
        ([35.0, 25.0], 2, 6),
        ([0.0, 0.0], 2, 0),
        ([1.0, 1.0, 1.0], 3, 1),
        ([], 3, None),
        ([None, None], 2, None),
        ([30.0, None], 2, 3),
        ([2.0, None], 2, 2),
        ([0.0, 0.0, None], 3, 1),
    ],
)
def test_what_the_loads_ask_for_at_ten_a_pod(
    loads: list[float | None], current: int, wanted: int | None
) -> None:
    assert wanted_replicas(loads, 10, current) == wanted


def decide(scaler: Scaler, loads: list[float | None], current: int, now: float) -> int:
    return scaler.decide(loads, target=10, minimum=1, maximum=8, current=current, now=now)


def test_up_at_once_but_at_most_to_twice_as_many() -> None:
    assert decide(Scaler(), [500.0], 1, 0) == 3
    assert decide(Scaler(), [500.0] * 3, 3, 0) == 6
    assert decide(Scaler(), [500.0] * 6, 6, 0) == 8


def test_down_only_after_five_minutes_of_wanting_less() -> None:
    scaler = Scaler()
    assert decide(scaler, [40.0, 40.0, 0.0, 0.0], 4, 0) == 8
    for now in range(15, 300, 15):
        assert decide(scaler, [1.0] * 8, 8, now) == 8
    assert decide(scaler, [1.0] * 8, 8, 301) == 1


def test_an_operator_that_has_just_started_does_not_scale_down_at_once() -> None:
    scaler = Scaler()
    for now in range(0, 300, 15):
        assert decide(scaler, [0.0] * 5, 5, now) == 5
    assert decide(scaler, [0.0] * 5, 5, 301) == 1


def test_missing_metrics_neither_scale_to_the_minimum_nor_to_the_maximum() -> None:
    scaler = Scaler()
    for now in range(0, 3600, 15):
        assert decide(scaler, [None] * 4, 4, now) == 4
        assert decide(scaler, [], 4, now) == 4


@given(
    st.lists(st.lists(st.none() | st.floats(0, 1000), max_size=9), max_size=30),
    st.integers(1, 4),
    st.integers(4, 9),
)
def test_the_limits_hold_whatever_comes(rounds: list[list[float | None]], low: int, high: int) -> None:
    scaler, current = Scaler(), 1
    for step, loads in enumerate(rounds):
        current = scaler.decide(loads, target=7, minimum=low, maximum=high, current=current, now=step * 40.0)
        assert low <= current <= high


def test_the_engines_own_metrics_are_understood() -> None:
    import dataclasses

    from leadline.engine.core.stats import SchedulerStats, Speeds
    from leadline.engine.server.metrics import Metrics

    def zeros(kind: type[Any]) -> dict[str, Any]:
        return {one.name: {} if "dict" in str(one.type) else 0 for one in dataclasses.fields(kind)}

    stats = SchedulerStats(**{**zeros(SchedulerStats), "running": 3, "waiting_by_class": {"batch": 2}})
    speeds = Speeds(**zeros(Speeds))
    text = Metrics(lambda: (stats, speeds, 0.0, True)).render().decode()
    assert parse_in_flight(text) == 5.0
    assert parse_in_flight(Metrics(lambda: None).render().decode()) is None
