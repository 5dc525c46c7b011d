"""Ready and Progressing while a service scales, rolls out or changes its template."""

from __future__ import annotations

from typing import Any

import pytest
from operator_builders import (
    NOW,
    SETTINGS,
    condition,
    deployment,
    ended,
    plan_of,
    pod,
    service,
    unschedulable,
    waiting,
)

from leadline.operator.planning.observed import Observed
from leadline.operator.planning.plan import plan

NO_GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available."


def test_zero_replicas() -> None:
    made = plan_of({"replicas": 0}, children=deployment(0))
    assert (condition(made)["status"], condition(made)["reason"]) == ("False", "ScaledToZero")


def test_a_service_that_shrinks_stays_ready_while_its_pods_go() -> None:
    pods = [pod(name, ready=True) for name in "abc"]
    made = plan_of({"replicas": 1}, children=deployment(3), pods=pods)
    assert (condition(made)["status"], condition(made)["reason"]) == ("True", "Ready")
    assert condition(made)["message"] == "1 of 1 pods serve"
    assert condition(made, "Progressing")["status"] == "True"
    too_few = plan_of({"replicas": 1}, children=deployment(3), pods=[pod()])
    assert condition(too_few)["status"] == "False"


def test_pods_of_a_service_that_is_scaled_to_zero_are_not_said_to_be_created() -> None:
    made = plan_of({"replicas": 0}, children=deployment(2), pods=[pod("a", ready=True), pod("b", ready=True)])
    ready = condition(made)
    assert (ready["status"], ready["reason"]) == ("False", "ScaledToZero")
    assert ready["message"] == "replicas is 0; 2 pods are to go"
    assert condition(made, "ModelAvailable")["status"] == "True"


@pytest.mark.parametrize("change", [{"replicas": 1}, {"servedName": "new"}])
def test_between_a_change_and_its_controllers_notice_the_last_word_stands_as_of_its_generation(
    change: dict[str, Any],
) -> None:
    pods = [pod("a", ready=True), pod("b", ready=True)]
    first = plan_of({"replicas": 2}, children=deployment(2), pods=pods)
    changed = service({"replicas": 2, **change}, status=first.status)
    changed["metadata"]["generation"] = 2
    children = deployment(2)
    (child,) = children.values()
    child["metadata"]["generation"] = 4
    made = plan(Observed(changed, NOW, children, pods), SETTINGS)
    assert made.status["conditions"] == first.status["conditions"]
    assert made.status["observedGeneration"] == 1, "so `kubectl wait` does not take it for an answer"
    assert made.events == []
    one_fails = [pods[0], pod("b", containerStatuses=[waiting("ErrImagePull", "x")])]
    failed = plan(Observed(changed, NOW, children, one_fails), SETTINGS)
    assert (condition(failed)["reason"], failed.status["observedGeneration"]) == ("ImagePullFailed", 1)
    refused = plan(Observed(changed, NOW, children, pods, refusal="no"), SETTINGS)
    assert (condition(refused)["reason"], refused.status["observedGeneration"]) == ("ApplyRefused", 2)


def test_a_deployment_that_somebody_scales_by_hand_does_not_cost_its_service_ready() -> None:
    """The operator takes it back at once; until then there is a pod too many, which starts."""
    first = plan_of({"replicas": 1}, children=deployment(1), pods=[pod("a", ready=True)])
    children = deployment(1)
    (child,) = children.values()
    child["metadata"]["generation"] = 5
    made = plan(
        Observed(service({"replicas": 1}, status=first.status), NOW, children, [pod("a", ready=True), NEW]),
        SETTINGS,
    )
    assert made.status["conditions"] == first.status["conditions"]


NEW = pod("new", phase="Pending", containerStatuses=[])


@pytest.mark.parametrize(
    "sentence", ['Created new replica set "qwen-engine-2"', 'ReplicaSet "qwen-engine-2" is progressing.']
)
def test_pods_that_fail_for_what_has_been_corrected_do_not_speak_for_the_rollout_that_replaces_them(
    sentence: str,
) -> None:
    """Three pods of an image that is not there, and one by one those of the right one."""
    bad = [of_template("1", pod(name, containerStatuses=[waiting("ErrImagePull", "x")])) for name in "abc"]
    said = {"conditions": [{"type": "Progressing", "status": "True", "message": sentence}]}
    loads = of_template("2", pod("d"))
    children = deployment(3, updated=1, total=3, **said)
    rolling = plan_of({"replicas": 3}, children=children, pods=[loads, *bad[1:]])
    assert condition(rolling)["reason"] == "RollingOut"
    assert condition(rolling)["message"] == "1 of 3 pods run the newest template; d: the engine is starting"
    assert condition(rolling, "Progressing")["status"] == "True"
    # Its own pods do, whatever they share with the old ones.
    wrong_too = of_template("2", pod("d", containerStatuses=[waiting("ErrImagePull", "y")]))
    failed = plan_of({"replicas": 3}, children=children, pods=[wrong_too, *bad[1:]])
    assert condition(failed)["reason"] == "ImagePullFailed"
    assert condition(failed)["message"].startswith("d: ")


def test_a_rollout_that_has_no_pod_yet_is_one_whatever_the_old_pods_suffer_from() -> None:
    bad = [pod(name, containerStatuses=[waiting("ErrImagePull", "x")]) for name in "ab"]
    made = plan_of({"replicas": 2}, children=deployment(2, updated=0, total=2), pods=bad)
    assert condition(made)["reason"] == "RollingOut"
    assert condition(made)["message"] == "0 of 2 pods run the newest template"


def of_template(number: str, made: dict[str, Any]) -> dict[str, Any]:
    made["metadata"]["labels"] = {"pod-template-hash": number}
    return made


def test_a_rollout_says_how_far_it_is() -> None:
    pods = [pod("a", ready=True), pod("b")]
    made = plan_of({"replicas": 2}, children=deployment(2, updated=1, total=2), pods=pods)
    assert condition(made)["reason"] == "RollingOut"
    assert condition(made)["message"].startswith("1 of 2 pods run the newest template")
    assert condition(made, "ModelAvailable")["status"] == "True"


def test_a_rollout_whose_new_pod_finds_no_gpu_is_blocked() -> None:
    pods = [pod("a", ready=True), unschedulable(NO_GPU, "b")]
    made = plan_of({"replicas": 1}, children=deployment(1, updated=1, total=2), pods=pods)
    assert condition(made)["reason"] == "RolloutBlocked"
    assert "maxSurge" in condition(made)["message"]
    assert condition(made, "ModelAvailable")["status"] == "True"


def test_a_rollout_that_somebody_has_paused_is_blocked_and_says_how_it_goes_on() -> None:
    children = deployment(1, updated=0, total=1)
    (child,) = children.values()
    child["spec"]["paused"] = True
    made = plan_of(children=children, pods=[pod("a", ready=True)])
    assert condition(made)["reason"] == "RolloutBlocked"
    assert "`kubectl rollout resume deployment qwen-engine`" in condition(made)["message"]
    assert condition(made, "Progressing")["status"] == "False"
    crashes = pod("a", containerStatuses=[waiting("CrashLoopBackOff", "", last=ended(1, "boom"))])
    assert "boom" in condition(plan_of(children=children, pods=[crashes]))["message"]


def test_a_rollout_past_its_deadline_is_blocked() -> None:
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    made = plan_of(
        {"replicas": 2},
        children=deployment(2, updated=1, total=2, conditions=[late]),
        pods=[pod("a", ready=True), pod("b")],
    )
    assert condition(made)["reason"] == "RolloutBlocked"


def test_a_status_that_the_controller_has_not_brought_up_to_date_is_not_believed() -> None:
    children = deployment(1)
    (child,) = children.values()
    child["metadata"]["generation"] = 4
    assert condition(plan_of(children=children, pods=[pod(ready=True)]))["status"] == "False"
