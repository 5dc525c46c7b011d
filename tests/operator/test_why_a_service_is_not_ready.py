"""Conditions and events, from pod statuses as kubelet and scheduler write them."""

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
from leadline.protocol.isvc_termination import TERMINATION_VARIABLE, read_termination, write_termination

NO_GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available."

# case → (container status, reason, part of the message)
CONTAINERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "the image does not exist": (
        waiting("ErrImagePull", 'failed to pull image "engine:1": not found'),
        "ImagePullFailed",
        "not found",
    ),
    "the kubelet backs off from pulling": (
        waiting("ImagePullBackOff", "Back-off"),
        "ImagePullFailed",
        "engine:1",
    ),
    "the image may not be pulled": (waiting("ErrImageNeverPull", "policy Never"), "ImagePullFailed", "Never"),
    "the image's name is wrong": (waiting("InvalidImageName", "couldn't parse"), "ImagePullFailed", "parse"),
    "a secret is missing": (
        waiting("CreateContainerConfigError", 'secret "hub" not found'),
        "ConfigFailed",
        'secret "hub" not found',
    ),
    "the command is missing": (waiting("RunContainerError", "no such file"), "ConfigFailed", "no such file"),
    "a crash": (
        waiting("CrashLoopBackOff", "back-off 10s", last=ended(1, "Traceback\nKeyError: 'x'")),
        "CrashLoop",
        "KeyError: 'x'",
    ),
    "a crash without a word": (
        waiting("CrashLoopBackOff", "", last=ended(139)),
        "CrashLoop",
        "exit code 139 (SIGSEGV: a crash in native code)",
    ),
    "killed from outside": (
        waiting("CrashLoopBackOff", "", last=ended(137)),
        "CrashLoop",
        "exit code 137 (SIGKILL: killed from outside: the node ran out of memory, or the container did not",
    ),
    "told to stop": (waiting("CrashLoopBackOff", "", last=ended(143)), "CrashLoop", "143 (SIGTERM: told to"),
    "a signal of no meaning here": (waiting("CrashLoopBackOff", last=ended(130)), "CrashLoop", "(SIGINT)"),
    "a signal without a name": (waiting("CrashLoopBackOff", last=ended(160)), "CrashLoop", "(signal 32)"),
    "no command": (waiting("CrashLoopBackOff", last=ended(127)), "CrashLoop", "its command is not in the"),
    "a code of the program's": (waiting("CrashLoopBackOff", last=ended(255)), "CrashLoop", "exit code 255"),
    "a crash, and running again": (running(restarts=1, last=ended(1, "boom")), "CrashLoop", "boom"),
    "an end in good order, again and again": (
        waiting("CrashLoopBackOff", "", last=ended(0, reason="Completed")),
        "CrashLoop",
        "again and again",
    ),
    "killed at the memory limit": (
        waiting("CrashLoopBackOff", "", last=ended(137, reason="OOMKilled")),
        "OutOfMemory",
        "memory limit",
    ),
    "GPU memory": (
        waiting(
            "CrashLoopBackOff", "", last=ended(1, "leadline: the weights do not fit: lower max_model_len")
        ),
        "OutOfMemory",
        "lower max_model_len",
    ),
    "being created": (waiting("ContainerCreating"), "CreatingPods", "being made"),
    "starting": (running(), "LoadingWeights", "the engine is starting"),
}


@pytest.mark.parametrize("case", CONTAINERS)
def test_a_container_says_why(case: str) -> None:
    status, reason, part = CONTAINERS[case]
    made = plan_of(children=deployment(), pods=[pod(containerStatuses=[status])])
    ready = condition(made)
    assert (ready["status"], ready["reason"]) == ("False", reason)
    assert part in ready["message"]
    assert ready["message"].startswith("p1: ")
    (event,) = made.events
    assert (event.reason, event.message) == (reason, ready["message"])
    assert event.warning == (reason not in ("CreatingPods", "LoadingWeights"))


def _sentence_of(name: str) -> str:
    """What `leadline serve` really prints for a model that is not there."""
    from leadline.engine.errors import LeadlineError
    from leadline.engine.hub import resolve_model

    with pytest.raises(LeadlineError) as caught:
        resolve_model(name)
    return f"some log line\nleadline: {caught.value}"


@pytest.mark.parametrize(
    "name", ["file:///nowhere", "hf://org", "hf://org/not-in-the-cache", "s3://x/y", "nope"]
)
def test_the_engines_own_sentences_are_understood_as_model_not_found(name: str) -> None:
    status = waiting("CrashLoopBackOff", "", last=ended(1, _sentence_of(name)))
    made = plan_of(children=deployment(), pods=[pod(containerStatuses=[status])])
    assert condition(made)["reason"] == "ModelNotFound"
    assert "some log line" not in condition(made)["message"]


def test_a_folder_that_is_no_model_is_model_not_found(tmp_path: Path) -> None:
    status = waiting("CrashLoopBackOff", "", last=ended(1, _sentence_of(f"file://{tmp_path}")))
    made = plan_of(children=deployment(), pods=[pod(containerStatuses=[status])])
    assert condition(made)["reason"] == "ModelNotFound"


@pytest.mark.parametrize(
    "sentence",
    [
        "hf://m/l is gated: ask for access on its model page, then set HF_TOKEN to a token of that account",
        "the hub refused the token for hf://a/b (HTTP 401); check HF_TOKEN",
    ],
)
def test_a_refused_token_is_unauthorized(sentence: str) -> None:
    status = waiting("CrashLoopBackOff", "", last=ended(1, f"leadline: {sentence}\n"))
    made = plan_of(children=deployment(), pods=[pod(containerStatuses=[status])])
    assert condition(made)["reason"] == "Unauthorized"


@pytest.mark.parametrize(
    ("sentence", "reason"),
    [
        ("hf://a/b is not in the local cache and the hub cannot be reached: [Errno 111]", "ModelUnreachable"),
        ("the hub answered HTTP 503 for hf://a/b: Service Unavailable", "ModelUnreachable"),
        ("the download of hf://a/b broke off: timed out", "ModelUnreachable"),
        ("the hub answered HTTP 410 for hf://a/b: Gone", "ModelNotFound"),
    ],
)
def test_a_hub_that_does_not_answer_says_nothing_of_the_model_and_may_come_back(
    sentence: str, reason: str
) -> None:
    status = waiting("CrashLoopBackOff", "", last=ended(1, f"leadline: {sentence}\n"))
    made = plan_of(children=deployment(), pods=[pod(initContainerStatuses=[status])])
    assert (condition(made)["status"], condition(made)["reason"]) == ("False", reason)
    passes = reason == "ModelUnreachable"
    assert condition(made)["message"].endswith("; it is tried again") == passes
    assert condition(made, "Progressing")["status"] == str(passes)
    assert [event.warning for event in made.events] == [True]


def _crash(message: str, code: int = 1) -> str:
    """The reason of Ready when the engine has ended with this termination message."""
    status = waiting("CrashLoopBackOff", "", last=ended(code, message))
    made = condition(plan_of(children=deployment(), pods=[pod(containerStatuses=[status])]))
    return f"{made['reason']} {made['message']}"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["model-path", "file:///nowhere"], "ModelNotFound p1: no model at /nowhere"),
        (["serve", "smollm2", "--port=70000"], "ConfigError p1: port must lie between 0 and 65535"),
    ],
)
def test_the_command_leaves_its_errors_type_and_sentence_where_kubernetes_reads_them(
    words: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leadline.cli.main import main

    monkeypatch.setenv(TERMINATION_VARIABLE, str(tmp_path / "log"))
    assert main(words) == 1
    assert _crash((tmp_path / "log").read_text()).startswith(reason)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("Unauthorized", "Unauthorized"),
        ("ModelNotFound", "ModelNotFound"),
        ("ModelUnreachable", "ModelUnreachable"),
        ("UnsupportedModel", "ModelUnsupported"),
        ("OutOfMemory", "OutOfMemory"),
        ("ConfigError", "ConfigError"),
        ("EngineDead", "CrashLoop"),
        ("KeyError", "CrashLoop"),
    ],
)
def test_an_errors_type_decides_whatever_its_words_are(kind: str, reason: str, tmp_path: Path) -> None:
    import builtins

    from leadline.engine import errors

    assert issubclass(getattr(errors, kind, None) or getattr(builtins, kind), Exception)
    write_termination(str(tmp_path / "log"), kind, "no model at this architecture")
    assert _crash((tmp_path / "log").read_text()).removesuffix("; it is tried again") == (
        f"{reason} p1: no model at this architecture"
        if reason != "CrashLoop"
        else "CrashLoop p1: engine ended with exit code 1: no model at this architecture"
    )


def test_the_gpus_own_words_for_a_lack_of_memory_are_understood(tmp_path: Path) -> None:
    write_termination(str(tmp_path / "log"), "OutOfMemoryError", "CUDA out of memory. Tried to allocate")
    assert _crash((tmp_path / "log").read_text()).startswith("OutOfMemory ")


def test_a_termination_message_keeps_within_what_kubernetes_keeps(tmp_path: Path) -> None:
    write_termination(str(tmp_path / "log"), "ConfigError", '"模型"' * 5000)
    assert len((tmp_path / "log").read_bytes()) <= 4096
    told = read_termination((tmp_path / "log").read_text())
    assert told is not None
    assert len(told.message) > 1000


def test_an_argument_that_this_engine_does_not_know_is_a_config_error() -> None:
    usage = "usage: leadline [-h] COMMAND ...\nleadline: error: unrecognized arguments: --colour=red"
    assert _crash(usage, 2).startswith("ConfigError p1: error: unrecognized arguments: --colour=red")
    usage = (
        "usage: leadline serve [-h]\nleadline serve: error: argument --prefill-chunk: invalid int value: 'x'"
    )
    assert _crash(usage, 2).startswith("ConfigError p1: leadline serve: error: argument --prefill-chunk")


def test_a_failing_init_container_says_why_too() -> None:
    init = {
        "name": "fetch",
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": ended(2)},
    }
    made = plan_of(
        children=deployment(),
        pods=[pod(initContainerStatuses=[init], containerStatuses=[waiting("PodInitializing")])],
    )
    assert condition(made)["message"] == "p1: fetch ended with exit code 2"


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
