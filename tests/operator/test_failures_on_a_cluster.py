"""What keeps pods of a real cluster from serving: reasons in the status, events and clients' answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster_tools import Cluster, gateway, is_ready, operator, service, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

# What may stand in an InferenceService, and not in a Deployment → what the API server says.
NO_POD_TEMPLATES: dict[str, tuple[dict[str, Any], str]] = {
    "a field that is misspelt": (
        {"imagePullpolicy": "Never"},
        "imagePullpolicy: field not declared in schema",
    ),
    "a number that wants quotes": ({"env": [{"name": "N", "value": 1}]}, "value: expected string, got"),
    "a map for a list": ({"args": {"a": "b"}}, "args: expected list"),
}


def test_a_pod_template_that_is_none_is_said_and_what_runs_stays(cluster: Cluster, tmp_path: Path) -> None:
    with operator(cluster, tmp_path) as process:
        cluster.apply(service("typo"))
        until(lambda: is_ready(cluster, "typo"), explain=process.text)
        for case, (fields, sentence) in NO_POD_TEMPLATES.items():
            wrong = service("typo")
            wrong["spec"]["podTemplate"]["spec"]["containers"][0] |= fields
            cluster.apply(wrong)
            until(
                lambda sentence=sentence: sentence in cluster.ready("typo").get("message", ""),
                20,
                lambda case=case: (case, cluster.ready("typo"), process.text()[-2000:]),
            )
            assert cluster.ready("typo")["reason"] == "ApplyRefused"
        cluster.apply(service("typo"))
        until(lambda: is_ready(cluster, "typo"), explain=process.text)


FAILURES = {
    "ImagePullFailed": {"image": "leadline/not-there:1"},
    "CrashLoop": {"command": "echo something broke; exit 3"},
    "ModelNotFound": {
        "command": "echo 'leadline: no model at /model/x: the path does not exist' >&2; exit 1"
    },
    "InsufficientGPU": {
        "accelerator": {"type": "gpu", "resourceName": "example.com/gpu"},
        "tensorParallel": 2,
    },
    "ConfigFailed": {"model": "hf://org/name", "tokenSecretRef": {"name": "not-there"}},
    "Unschedulable": {"model": "pvc://not-there/llama"},
    "PodsRefused": {"podTemplate": {"spec": {"hostNetwork": True}}},
    "LoadingWeights": {"command": "sleep 1000"},
    "ApplyRefused": {"podTemplate": {"spec": {"terminationGracePeriodSeconds": 1}}},
}


def test_what_keeps_pods_from_serving_is_said_within_seconds_as_an_event_and_to_clients(
    cluster: Cluster, tmp_path: Path
) -> None:
    with gateway(cluster, tmp_path) as front, operator(cluster, tmp_path) as process:
        names = {reason: reason.lower() for reason in FAILURES}
        cluster.apply(*(service(names[reason], **spec) for reason, spec in FAILURES.items()))
        for reason, name in names.items():
            until(
                lambda reason=reason, name=name: cluster.ready(name).get("reason") == reason,
                30,
                lambda name=name: (name, cluster.ready(name), cluster.items("pods")),
            )
            assert cluster.ready(name)["status"] == "False"
        said = {(one["involvedObject"]["name"], one["reason"]) for one in cluster.items("events")}
        assert {(name, reason) for reason, name in names.items()} <= said
        assert "exit code 3: something broke" in cluster.ready("crashloop")["message"]
        for reason, name in names.items():
            until(
                lambda reason=reason, name=name: reason in front.chat(name)[1]["error"]["message"],
                10,
                lambda name=name: front.chat(name),
            )
            status, body = front.chat(name)
            assert (status, body["error"]["code"]) == (503, "no_pods")
            assert body["error"]["message"].endswith(
                f"{name} has no pod that takes requests: the operator reports {reason}"
            )
        assert "fault of the operator" not in process.text()


def test_a_pod_whose_engine_has_limits_is_guaranteed_although_it_downloads(
    cluster: Cluster, tmp_path: Path
) -> None:
    amounts = {"cpu": "100m", "memory": "64Mi"}
    limited, plain = (service(name, model="hf://org/name") for name in ("limited", "plain"))
    engine = limited["spec"]["podTemplate"]["spec"]["containers"][0]
    engine["resources"] = {"requests": amounts, "limits": amounts}

    def classes() -> dict[str, str]:
        pods = cluster.items("pods")
        return {
            one["metadata"]["labels"]["serving.leadline.io/service"]: one["status"]["qosClass"]
            for one in pods
        }

    with operator(cluster, tmp_path) as process:
        cluster.apply(limited, plain)
        until(lambda: len(classes()) == 2, explain=process.text)
        assert classes() == {"limited": "Guaranteed", "plain": "Burstable"}


def test_a_node_that_turns_down_what_was_given_to_it_is_said(cluster: Cluster, tmp_path: Path) -> None:
    """As Topology Manager does with GPUs of two NUMA nodes: the scheduler knows nothing of it."""
    nodes = json.loads(cluster.kubectl("get", "nodes", "-o", "json", namespaced=False))["items"]
    node = next(one for one in nodes if not one["spec"].get("taints"))["metadata"]["name"]
    placed = service("placed")
    pod = placed["spec"]["podTemplate"]["spec"]
    pod["nodeName"] = node  # past the scheduler
    pod["containers"][0]["resources"] = {"requests": {"cpu": "1000"}}
    with operator(cluster, tmp_path) as process:
        cluster.apply(placed)
        until(lambda: cluster.ready("placed").get("reason") == "Unschedulable", explain=process.text)
        cluster.kubectl("delete", "isvc", "placed")
        assert "turned it down: OutOfcpu: " in process.text()
