"""Reasons of Ready from the statuses of containers, as kubelets and engines write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from operator_builders import condition, deployment, ended, plan_of, pod, running, waiting

from leadline.protocol.isvc_termination import TERMINATION_VARIABLE, read_termination, write_termination

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
