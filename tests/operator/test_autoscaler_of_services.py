"""How many replicas: ups at once, downs late, and holding on when nothing is known."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.operator.autoscaling.autoscaler import Scaler, wanted_replicas
from leadline.operator.autoscaling.demand import (
    Demand,
    GatewayView,
    gateway_counts,
    of_gateway,
    of_pods,
    parse_gateway,
    parse_in_flight,
)


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
    assert wanted_replicas(of_pods(loads, 10), 10, current) == wanted


def decide(scaler: Scaler, loads: list[float | None], current: int, now: float) -> int:
    return scaler.decide(of_pods(loads, 10), target=10, minimum=1, maximum=8, current=current, now=now)


def view(**in_flight: float) -> GatewayView:
    return GatewayView({f"team/{name}": count for name, count in in_flight.items()})


VIEWS: dict[str, tuple[list[GatewayView | None], bool, Demand | None]] = {
    "no gateway": ([], False, None),
    "a gateway that does not know the service": ([view(other=9)], False, None),
    "one replica": ([view(qwen=3)], True, Demand(3, 3)),
    "all replicas": ([view(qwen=3), view(qwen=4, other=9)], True, Demand(7, 7)),
    "a replica that has just come and does not know it yet": ([view(qwen=3), view()], True, Demand(3, 3)),
    "a silent replica": ([view(qwen=3), None], True, Demand(3, math.inf)),
    "all replicas silent": ([None, None], True, None),
}


@pytest.mark.parametrize("case", VIEWS)
def test_the_gateways_replicas_are_added_up(case: str) -> None:
    views, counts, demand = VIEWS[case]
    assert gateway_counts(views, "team/qwen") == counts
    if counts:
        assert of_gateway(views, "team/qwen") == demand


@pytest.mark.parametrize(("low", "wanted"), [(5, 3), (29, 3), (45, 5)])
def test_a_silent_replica_of_the_gateway_may_lead_up_but_never_down(low: float, wanted: int) -> None:
    assert wanted_replicas(Demand(low, math.inf), 10, 3) == wanted


def test_a_gateways_own_metrics_are_understood() -> None:
    from leadline.gateway.metrics.metrics import GatewayMetrics
    from leadline.gateway.policies.random_choice import RandomPolicy
    from leadline.gateway.services import Service

    metrics = GatewayMetrics()
    services = [Service(name=name, model="", policy=RandomPolicy()) for name in ("team/qwen", "team/calm")]
    metrics.refresh(services, 0.0)
    metrics.in_flight.labels("team/qwen").set(3)
    metrics.in_flight.labels("").set(9)  # requests that got no further belong to no service
    assert parse_gateway(metrics.render().decode()) == view(qwen=3, calm=0)
    assert parse_gateway("leadline_engine_running_requests 1.0") is None


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
        current = scaler.decide(
            of_pods(loads, 7), target=7, minimum=low, maximum=high, current=current, now=step * 40.0
        )
        assert low <= current <= high


def test_the_engines_own_metrics_are_understood() -> None:
    import dataclasses

    from leadline.engine.core.stats import SchedulerStats, Speeds
    from leadline.engine.server.metrics.metrics import Metrics

    def zeros(kind: type[Any]) -> dict[str, Any]:
        return {one.name: {} if "dict" in str(one.type) else 0 for one in dataclasses.fields(kind)}

    stats = SchedulerStats(**{**zeros(SchedulerStats), "running": 3, "waiting_by_class": {"batch": 2}})
    speeds = Speeds(**zeros(Speeds))
    text = Metrics(lambda: (stats, speeds, 0.0, True)).render().decode()
    assert parse_in_flight(text) == 5.0
    assert parse_in_flight(Metrics(lambda: None).render().decode()) is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e308", "many"])
def test_what_is_no_number_of_requests_is_refused(value: str) -> None:
    """A team may run any image, and an infinite demand would end the autoscaler of all services."""
    with pytest.raises(ValueError, match=r"requests in flight|could not convert"):
        parse_in_flight(f"leadline_engine_running_requests {value}\n")
