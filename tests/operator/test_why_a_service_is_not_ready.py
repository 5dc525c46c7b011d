"""Conditions and events from pods that are not scheduled, not admitted, starting, stalled or leaving."""

from __future__ import annotations

from pathlib import Path
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
    running,
    service,
    unschedulable,
    waiting,
)

from leadline.operator.planning.diagnosis import lacks_secret
from leadline.operator.planning.observed import Observed, StartReport
from leadline.operator.planning.plan import plan
from leadline.protocol.isvc_termination import write_termination

NO_GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available."


def test_no_node_with_enough_gpus() -> None:
    made = plan_of(children=deployment(), pods=[unschedulable(NO_GPU)])
    assert condition(made)["reason"] == "InsufficientGPU"
    assert "nvidia.com/gpu" in condition(made)["message"]
    assert condition(made, "Progressing")["status"] == "False"


def test_another_reason_not_to_be_scheduled_is_not_called_a_lack_of_gpus() -> None:
    made = plan_of(children=deployment(), pods=[unschedulable('persistentvolumeclaim "models" not found')])
    assert condition(made)["reason"] == "Unschedulable"


def turned_down(name: str, reason: str, created: str = "11:59:00", template: str = "t2") -> dict[str, Any]:
    """As the kubelet leaves a pod that it did not admit."""
    made = pod(name, phase="Failed", reason=reason, message="Pod was rejected: no", containerStatuses=[])
    made["metadata"] |= {"labels": {"pod-template-hash": template}}
    made["metadata"] |= {"creationTimestamp": f"2026-11-30T{created}Z"}
    return made


def coming(created: str, *containers: dict[str, Any]) -> dict[str, Any]:
    made = turned_down("new", "", created)
    made["status"] |= {"phase": "Pending", "containerStatuses": list(containers)}
    return made


TURNED_DOWN: dict[str, tuple[list[dict[str, Any]], str]] = {
    "GPUs of two NUMA nodes": ([turned_down("a", "TopologyAffinityError")], "Unschedulable"),
    "a GPU that was lost": ([turned_down("a", "OutOfnvidia.com/gpu")], "InsufficientGPU"),
    "no CPU": ([turned_down("a", "OutOfcpu")], "Unschedulable"),
    "a successor comes": ([turned_down("a", "OutOfcpu"), coming("11:59:01")], "Unschedulable"),
    "a successor runs": ([turned_down("a", "OutOfcpu"), coming("11:59:01", running())], "LoadingWeights"),
    "long ago": ([turned_down("a", "OutOfcpu"), coming("12:59:00")], "CreatingPods"),
    "of an older template": (
        [turned_down("a", "OutOfcpu", template="t1"), coming("11:59:01")],
        "CreatingPods",
    ),
    "evicted, not turned down": ([turned_down("a", "Evicted")], "CreatingPods"),
}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"replicas": 2, "cache": {"size": "5Gi"}}, True),
        ({"replicas": 1, "cache": {"size": "5Gi"}}, False),
        ({"replicas": 2, "cache": {"size": "5Gi", "accessMode": "ReadWriteMany"}}, False),
        ({"replicas": 2}, False),
    ],
)
def test_pods_without_a_place_that_share_a_claim_of_one_node_are_told_of_it(
    spec: dict[str, Any], said: bool
) -> None:
    pods = [pod("a", ready=True), unschedulable("0/2 nodes are available: 1 Insufficient cpu", "b")]
    message = condition(plan_of(spec, children=deployment(2), pods=pods))["message"]
    assert ("cache.accessMode is ReadWriteOnce, so all pods of the service need one node" in message) == said


@pytest.mark.parametrize("case", TURNED_DOWN)
def test_a_node_that_turns_pods_down_is_said(case: str) -> None:
    pods, reason = TURNED_DOWN[case]
    assert condition(plan_of(children=deployment(), pods=pods))["reason"] == reason


def test_the_sentence_stays_while_pods_are_turned_down_one_after_the_other() -> None:
    pods = [turned_down(name, "TopologyAffinityError", f"11:59:0{at}") for at, name in enumerate("cab")]
    said = [condition(plan_of(children=deployment(), pods=pods[:n]))["message"] for n in (1, 3)]
    assert said == ["c: its node turned it down: TopologyAffinityError: Pod was rejected: no"] * 2


def test_pods_that_the_api_server_refuses() -> None:
    refusal = {
        "type": "ReplicaFailure",
        "status": "True",
        "message": 'violates PodSecurity "restricted:latest"',
    }
    made = plan_of(children=deployment(1, 0, conditions=[refusal]))
    assert condition(made)["reason"] == "PodsRefused"
    assert "PodSecurity" in condition(made)["message"]


def test_a_pod_that_lacks_a_secret_of_ours_is_told_from_one_that_lacks_another() -> None:
    said = 'FailedMount: MountVolume.SetUp failed for volume "redis" : secret "qwen-redis" not found'
    assert lacks_secret(["FailedMount: x", said], "qwen-redis")
    assert not lacks_secret([said], "redis")
    assert not lacks_secret([], "qwen-redis")


def test_a_pod_that_waits_for_its_volumes_says_where_to_look() -> None:
    made = pod(phase="Pending", containerStatuses=[waiting("ContainerCreating")])
    for status, text in (
        ("False", "its volumes and network are not ready yet; "),
        ("True", "its containers "),
    ):
        made["status"]["conditions"] = [
            {"type": "PodScheduled", "status": "True"},
            {"type": "PodReadyToStartContainers", "status": status},
        ]
        ready = condition(plan_of(children=deployment(), pods=[made]))
        assert ready["reason"] == "CreatingPods"
        assert ready["message"].startswith(f"p1: {text}")


def test_a_pod_whose_predecessor_was_evicted_says_why() -> None:
    """Of a model that is too large for its node's disk nothing else tells: each pod begins anew, and goes."""
    evicted = turned_down("a", "Evicted", "11:00:00")
    evicted["status"]["message"] = "The node was low on resource: ephemeral-storage."
    pods = [evicted, coming("11:59:00", running())]
    report = StartReport("not ready", "downloading", 0.5, "8 of 16 GB")
    ready = condition(plan_of(children=deployment(), pods=pods, progress={"uid-new": report}))
    assert ready["reason"] == "Downloading"
    assert ready["message"] == (
        "new: downloading: 8 of 16 GB (50 %); a was evicted: The node was low on resource: ephemeral-storage."
    )
    pods[0]["metadata"]["labels"]["pod-template-hash"] = "t1"
    assert "evicted" not in condition(plan_of(children=deployment(), pods=pods))["message"]


def test_a_quota_is_said_while_the_pods_that_it_left_still_load() -> None:
    refusal = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"}
    made = plan_of({"replicas": 2}, children=deployment(2, 1, conditions=[refusal]), pods=[pod()])
    assert (condition(made)["reason"], condition(made)["message"]) == ("PodsRefused", "exceeded quota: gpus")
    crash = pod(containerStatuses=[waiting("CrashLoopBackOff", "", last=ended(1, "boom"))])
    made = plan_of({"replicas": 2}, children=deployment(2, 1, conditions=[refusal]), pods=[crash])
    assert condition(made)["reason"] == "PodsRefused", "without a hand it does not pass"


def _says(report: StartReport | None, **status: Any) -> str:
    progress = {} if report is None else {"uid-p1": report}
    made = condition(plan_of(children=deployment(), pods=[pod(**status)], progress=progress))
    return f"{made['reason']} {made['message']}"


DOWNLOADING = {
    "initContainerStatuses": [{**running(), "name": "download"}],
    "containerStatuses": [waiting("PodInitializing")],
}


def test_a_download_says_how_far_it_is() -> None:
    report = StartReport("not ready", "downloading", 0.2105, "3.22 of 15.30 GB")
    text = "Downloading p1: downloading: 3.22 of 15.30 GB (21 %)"
    assert _says(report, **DOWNLOADING) == text
    assert _says(report) == text  # by the engine itself, where a podTemplate has removed the init container
    for unknown in (None, StartReport("not ready: hf://org/name is being fetched")):
        assert _says(unknown, **DOWNLOADING) == "Downloading p1: the download begins"


def test_loading_says_how_far_it_is() -> None:
    report = StartReport("not ready", "loading weights", 0.42, "0.23 of 0.54 GB")
    assert _says(report) == "LoadingWeights p1: loading weights: 0.23 of 0.54 GB (42 %)"
    assert (
        _says(StartReport("not ready", "capturing CUDA graphs")) == "LoadingWeights p1: capturing CUDA graphs"
    )
    assert _says(StartReport("not ready: loading")) == "LoadingWeights p1: loading"


def test_a_download_that_fails_is_told_from_one_that_runs(tmp_path: Path) -> None:
    write_termination(str(tmp_path / "log"), "Unauthorized", "the hub refused the token")
    crash = {
        **waiting("CrashLoopBackOff", "", last=ended(1, (tmp_path / "log").read_text())),
        "name": "download",
    }
    assert _says(None, **{**DOWNLOADING, "initContainerStatuses": [crash]}) == (
        "Unauthorized p1: the hub refused the token"
    )


def test_ready_when_all_wanted_pods_of_the_newest_template_are() -> None:
    made = plan_of({"replicas": 2}, children=deployment(2), pods=[pod("a", ready=True), pod("b", ready=True)])
    assert (condition(made)["status"], condition(made)["reason"]) == ("True", "Ready")
    assert condition(made, "ModelAvailable")["status"] == "True"
    assert (made.status["readyReplicas"], made.status["replicas"]) == (2, 2)


def test_one_crashing_pod_of_two_is_not_ready_but_the_model_is_available() -> None:
    crash = pod("b", containerStatuses=[waiting("CrashLoopBackOff", "", last=ended(1, "boom"))])
    made = plan_of({"replicas": 2}, children=deployment(2), pods=[pod("a", ready=True), crash])
    assert (condition(made)["status"], condition(made)["reason"]) == ("False", "CrashLoop")
    assert condition(made, "ModelAvailable")["status"] == "True"


@pytest.mark.parametrize(
    ("turned", "reason"),
    [("2026-11-30T11:58:58Z", "LoadingWeights"), ("2026-11-30T11:59:30Z", "NotResponding")],
)
def test_a_pod_that_was_ready_and_stalls_is_not_said_to_load(turned: str, reason: str) -> None:
    made = pod(containerStatuses=[{**running(), "started": True}])
    made["status"]["conditions"][1]["lastTransitionTime"] = turned
    assert condition(plan_of(children=deployment(), pods=[made]))["reason"] == reason


def test_a_pod_whose_node_is_gone_says_so() -> None:
    """The control plane takes its readiness; what the kubelet said last of the container stands."""
    made = pod(containerStatuses=[{**running(ready=True), "started": True}])
    made["spec"] = {"nodeName": "gpu-7"}
    made["status"]["conditions"][1]["lastTransitionTime"] = "2026-11-30T11:59:30Z"
    said = condition(plan_of(children=deployment(), pods=[made]))
    assert said["reason"] == "NotResponding"
    assert "its node gpu-7 no longer reports" in said["message"]
    made["status"]["containerStatuses"][0]["ready"] = False
    said = condition(plan_of(children=deployment(), pods=[made]))
    assert said["message"].endswith("it does not answer /ready")


def test_what_a_person_must_act_on_goes_before_what_passes() -> None:
    pods = [pod("a"), unschedulable(NO_GPU, "b"), pod("c", containerStatuses=[waiting("ErrImagePull", "x")])]
    assert (
        condition(plan_of({"replicas": 3}, children=deployment(3), pods=pods))["reason"] == "ImagePullFailed"
    )


def test_pods_on_their_way_out_do_not_count() -> None:
    leaving = pod("old", ready=True)
    leaving["metadata"]["deletionTimestamp"] = "2026-11-30T11:00:00Z"
    made = plan_of(children=deployment(), pods=[leaving])
    assert (made.status["replicas"], made.status["readyReplicas"]) == (0, 0)
    assert condition(made)["reason"] == "CreatingPods"


def test_the_time_of_a_transition_moves_only_with_the_status_and_events_only_with_the_reason() -> None:
    first = plan_of(children=deployment(), pods=[pod()])
    old = service(status=first.status)
    later = NOW.replace(hour=13)
    again = plan(Observed(old, later, deployment(), [pod()]), SETTINGS)
    assert again.status == first.status
    assert again.events == []
    crash = pod(containerStatuses=[waiting("CrashLoopBackOff", "", last=ended(1, "boom"))])
    crashed = plan(Observed(old, later, deployment(), [crash]), SETTINGS)
    assert condition(crashed)["lastTransitionTime"] == condition(first)["lastTransitionTime"]
    assert [event.reason for event in crashed.events] == ["CrashLoop"]
    ready = plan(Observed(old, later, deployment(), [pod(ready=True)]), SETTINGS)
    assert condition(ready)["lastTransitionTime"] == "2026-11-30T13:00:00Z"
