"""plan(): replicas, rollouts and autoscaling."""

from __future__ import annotations

from typing import Any

import pytest
from operator_builders import SETTINGS, condition, deployment, observed, plan_of, wanted

from leadline.operator.planning.observed import ScalingReport, Target
from leadline.operator.planning.plan import plan


def test_by_default_a_rollout_deletes_before_it_creates() -> None:
    strategy = wanted(plan_of(), "Deployment")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    asked = plan_of({"rollout": {"maxSurge": "25%", "maxUnavailable": 0}})
    strategy = wanted(asked, "Deployment")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": "25%", "maxUnavailable": 0}


@pytest.mark.parametrize(
    ("spec", "replicas"),
    [
        ({}, 1),
        ({"replicas": 0}, 0),
        ({"replicas": 3}, 3),
        ({"replicas": 1, "autoscaling": {"min": 2, "max": 4}}, 2),
        ({"replicas": 3, "autoscaling": {"min": 2, "max": 4}}, 3),
        ({"replicas": 9, "autoscaling": {"min": 2, "max": 4}}, 4),
        ({"replicas": 0, "autoscaling": {"min": 2, "max": 4}}, 0),
        ({"replicas": 0, "autoscaling": {"min": 0, "max": 4}}, 0),
    ],
)
def test_replicas_are_what_is_asked_for_within_the_autoscalers_limits(
    spec: dict[str, Any], replicas: int
) -> None:
    made = plan_of(spec)
    assert wanted(made, "Deployment")["spec"]["replicas"] == replicas
    assert made.status["desiredReplicas"] == replicas


@pytest.mark.parametrize(
    ("spec", "running", "replicas"),
    [
        ({}, None, 1),
        ({}, 3, 3),
        ({}, 0, 0),
        ({"autoscaling": {"min": 2, "max": 4}}, None, 2),
        ({"autoscaling": {"min": 2, "max": 4}}, 3, 3),
        ({"autoscaling": {"min": 0, "max": 4}}, None, 1),
        ({"autoscaling": {"min": 0, "max": 4}}, 0, 1),
    ],
)
def test_where_replicas_are_left_out_what_runs_stays_and_is_written_where_scale_reads_it(
    spec: dict[str, Any], running: int | None, replicas: int
) -> None:
    """An apply that takes `replicas` out of a manifest, for an autoscaler to have, must not cost pods."""
    made = plan_of(spec, children={} if running is None else deployment(running))
    assert wanted(made, "Deployment")["spec"]["replicas"] == made.replicas == replicas
    assert plan_of({**spec, "replicas": 3}, children=deployment(1)).replicas is None, "it is there"


def test_a_service_that_sleeps_is_told_from_one_that_is_off() -> None:
    spec = {"replicas": 0, "autoscaling": {"min": 0, "max": 4, "idleSeconds": 60}}
    found = observed(spec)
    found.service["metadata"]["annotations"] = {"serving.leadline.io/asleep": "true"}

    def ready() -> tuple[str, str]:
        (one,) = [one for one in plan(found, SETTINGS).status["conditions"] if one["type"] == "Ready"]
        return one["reason"], one["message"]

    assert ready() == ("Asleep", "no request came for 60 s; the next one starts a pod")
    del found.service["metadata"]["annotations"]
    assert ready() == ("ScaledToZero", "replicas is 0")


OURS = Target("apps", "Deployment", "team", "qwen-engine")


@pytest.mark.parametrize(
    ("acted", "autoscaled", "is_theirs"),
    [
        (True, frozenset({OURS}), True),
        (True, None, True),  # who knows
        (True, frozenset(), False),  # it has gone
        (True, frozenset({OURS._replace(name="other-engine")}), False),
        (False, frozenset({OURS}), False),  # no other client has set replicas: without us they would be 1
    ],
)
def test_replicas_are_left_alone_while_an_autoscaler_scales_the_deployment_itself(
    acted: bool, autoscaled: frozenset[Target] | None, is_theirs: bool
) -> None:
    children = deployment(5)
    (child,) = children.values()
    entry = {"manager": "kube-controller-manager", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    child["metadata"]["managedFields"] = [entry | {"subresource": "scale"}] if acted else []
    made = plan_of({"replicas": 3}, children=children, autoscaled=autoscaled)
    assert wanted(made, "Deployment")["spec"].get("replicas") == (None if is_theirs else 3)
    assert made.status["desiredReplicas"] == (5 if is_theirs else 3)


AUTOSCALING = {"replicas": 3, "autoscaling": {"min": 2, "max": 4}}


def after(reports: list[ScalingReport | None]) -> tuple[dict[str, Any], list[str]]:
    """The condition Autoscaling once the autoscaler has said all that, and its Events on the way."""
    status: dict[str, Any] = {}
    told: list[str] = []
    for report in reports:
        seen = observed(AUTOSCALING, children=deployment(3), scaling=report)
        seen.service["status"] = status
        made = plan(seen, SETTINGS)
        status = made.status
        told += [f"{one.reason}: {one.message}" for one in made.events if "utoscal" in one.message]
        told += [f"{one.reason}: {one.message}" for one in made.events if "in flight" in one.message]
    return condition(made, "Autoscaling"), told


UP = ScalingReport(True, "2 to 3 replicas: 90 requests in flight, targetConcurrency 32")

ASIDE = ScalingReport(False, "a HorizontalPodAutoscaler targets it")

IDLE = ScalingReport(True)


@pytest.mark.parametrize(
    ("reports", "reason", "message", "events"),
    [
        ([None], "AutoscalingActive", "2 to 4 replicas, 32 requests in flight each", []),
        ([None, UP], "AutoscalingActive", UP.message, [f"AutoscalingActive: {UP.message}"]),
        ([UP, UP, IDLE, None], "AutoscalingActive", UP.message, [f"AutoscalingActive: {UP.message}"]),
        ([None, ASIDE, None], "SteppedAside", ASIDE.message, [f"SteppedAside: {ASIDE.message}"]),
        (
            [ASIDE, IDLE],
            "AutoscalingActive",
            "2 to 4 replicas, 32 requests in flight each",
            [
                f"SteppedAside: {ASIDE.message}",
                "AutoscalingActive: 2 to 4 replicas, 32 requests in flight each",
            ],
        ),
    ],
)
def test_what_the_autoscaler_does_is_a_condition_and_each_decision_an_event(
    reports: list[ScalingReport | None], reason: str, message: str, events: list[str]
) -> None:
    found, told = after(reports)
    assert (found["reason"], found["message"]) == (reason, message)
    assert found["status"] == ("True" if reason == "AutoscalingActive" else "False")
    assert told == events


def test_a_service_without_autoscaling_says_nothing_of_it() -> None:
    assert "Autoscaling" not in [one["type"] for one in plan_of().status["conditions"]]
