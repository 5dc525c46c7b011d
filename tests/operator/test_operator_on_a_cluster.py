"""The operator against a real API server, scheduler and kubelet (rows P1 to P7, P17 and P24).

Needs KUBECONFIG, and a node that has the image local/busybox:1 (../shared/cluster has one).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_tools import (
    CHILDREN,
    ROOT,
    SERVES,
    Cluster,
    KubectlError,
    OperatorProcess,
    gateway,
    kubectl_path,
    operator,
    service,
    until,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def install_definition() -> None:
    """The CRD, as generated."""
    for words in (
        ("apply", "-f", str(ROOT / "manifests/crd.yaml")),
        ("wait", "--for=condition=Established", "crd/inferenceservices.serving.leadline.io"),
    ):
        subprocess.run([kubectl_path(), *words], check=True, timeout=60)


@pytest.fixture(scope="module", autouse=True)
def definition() -> None:
    install_definition()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def is_ready(cluster: Cluster, name: str) -> bool:
    return cluster.ready(name).get("status") == "True"


def versions(cluster: Cluster) -> dict[str, str]:
    """kind/name → resourceVersion, of everything an operator writes; Events by their number."""
    items = cluster.items(f"isvc,{CHILDREN},events")
    return {f"{one['kind']}/{one['metadata']['name']}": one["metadata"]["resourceVersion"] for one in items}


def test_six_lines_become_pods_that_serve_and_a_delete_leaves_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    with operator(cluster, tmp_path, "--gateway-url=http://gw") as process:
        cluster.apply(service("tiny", engine={"warmupPrompts": ["Hi"]}, cache={"size": "10Mi"}))
        until(lambda: is_ready(cluster, "tiny"), explain=process.text)
        kinds = {one["kind"] for one in cluster.items(CHILDREN, "-l", "serving.leadline.io/service=tiny")}
        assert kinds == {
            "Deployment",
            "Service",
            "PodDisruptionBudget",
            "NetworkPolicy",
            "ConfigMap",
            "PersistentVolumeClaim",
            "ServiceAccount",
        }
        fields = ("-l", "serving.leadline.io/service=tiny", "--show-managed-fields")
        entries = [
            one for child in cluster.items(CHILDREN, *fields) for one in child["metadata"]["managedFields"]
        ]
        assert {one["manager"] for one in entries if one["operation"] == "Apply"} == {"leadline-operator"}
        found = cluster.get("isvc", "tiny")
        assert found["status"]["url"] == "http://gw/v1"
        assert found["status"]["observedGeneration"] == found["metadata"]["generation"]
        # kopf must have left no trace (P6).
        assert "finalizers" not in found["metadata"]
        assert not [key for key in found["metadata"].get("annotations", {}) if "kopf" in key]
        reasons = {
            one["reason"] for one in cluster.items("events") if one["involvedObject"]["name"] == "tiny"
        }
        assert {"CreatingPods", "Ready"} <= reasons
    # The operator is down and a child is gone already: owner references still clean up (P6).
    cluster.kubectl("delete", "deploy", "tiny-engine")
    cluster.kubectl("delete", "isvc", "tiny")
    until(lambda: not cluster.items(f"pods,{CHILDREN}", "-l", "serving.leadline.io/service=tiny"))


BAD = {
    "a model of no known form": ({"model": "qwen"}, "model must be hf://ORG/NAME"),
    "replicas beside autoscaling": (
        {"replicas": 2, "autoscaling": {"max": 3}},
        "replicas and autoscaling exclude each other",
    ),
    "min above max": ({"autoscaling": {"min": 4, "max": 3}}, "must not be greater than autoscaling.max"),
    "a CPU has no ranks": ({"tensorParallel": 2, "accelerator": {"type": "cpu"}}, "tensorParallel must be 1"),
    "a rollout that cannot move": ({"rollout": {"maxUnavailable": 0}}, "must not both be 0"),
    "a cache of no size and no claim": ({"cache": {}}, "cache takes either claimName"),
    "a cache of both": ({"cache": {"claimName": "c", "size": "1Gi"}}, "cache takes either claimName"),
    "a class for a claim that exists": (
        {"cache": {"claimName": "c", "storageClass": "fast"}},
        "cache.storageClass is of a claim that is made",
    ),
    "no quantity": ({"cache": {"size": "10 GB"}}, "such as 100Gi"),
    "an argument of the operator's": (
        {"engine": {"extraArgs": ["--port=1"]}},
        "must not set what the operator sets",
    ),
    "a block size there is not": ({"engine": {"blockSize": 17}}, "supported values"),
    "a name with a comma": ({"aliases": ["a,b"]}, "no comma"),
    "an alias twice": ({"aliases": ["a", "a"]}, "Duplicate value"),
    "an unknown field": ({"tensorParalel": 2}, "unknown field"),
    "a prompt of two lines": ({"engine": {"warmupPrompts": ["a\nb"]}}, "one line"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_spec_is_refused_with_a_sentence(cluster: Cluster, case: str) -> None:
    spec, sentence = BAD[case]
    with pytest.raises(KubectlError, match=sentence):
        cluster.apply(service("bad", **spec))


@pytest.mark.parametrize("name", ["a" * 53, "dotted.name", "1digit"])
def test_a_name_that_cannot_be_a_services_is_refused(cluster: Cluster, name: str) -> None:
    with pytest.raises(KubectlError, match=r"metadata.name must be at most 52"):
        cluster.apply(service(name))


def test_what_cannot_change_is_refused_and_what_can_is_not(cluster: Cluster) -> None:
    cache = {"size": "2Gi", "storageClass": "standard"}
    cluster.apply(service("fixed", cache=cache))
    for change, sentence in (
        ({"storageClass": "other"}, "storageClass cannot change"),
        ({"accessMode": "ReadWriteMany"}, "accessMode cannot change"),
        ({"size": "1Gi"}, "can only grow"),
    ):
        with pytest.raises(KubectlError, match=sentence):
            cluster.apply(service("fixed", cache={**cache, **change}))
    cluster.apply(service("fixed", cache={**cache, "size": "3Gi"}, model="hf://Qwen/Qwen3-8B"))
    cluster.apply(service("fixed", cache={"claimName": "shared"}))
    cluster.apply(service("fixed", cache={"size": "1Gi"}))


def test_a_cache_that_is_taken_away_leaves_its_claim_and_finds_it_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    def uid() -> str:
        found: str = cluster.get("pvc", "weights-engine")["metadata"]["uid"]
        return found

    def message() -> str:
        return str(cluster.ready("weights").get("message"))

    with operator(cluster, tmp_path) as process:
        cluster.apply(service("weights", replicas=0, cache={"size": "10Mi", "storageClass": "standard"}))
        until(lambda: cluster.get("pvc", "weights-engine"), explain=process.text)
        before = uid()
        cluster.apply(service("weights", replicas=0))
        until(lambda: "claim weights-engine (10Mi)" in message(), explain=process.text)
        reasons = [one["reason"] for one in cluster.items("events")]
        assert reasons.count("CacheRetained") == 1
        cluster.apply(service("weights", replicas=0, cache={"size": "9Mi"}))
        until(lambda: "cache.size cannot be had" in message(), explain=process.text)
        cluster.apply(service("weights", replicas=0, cache={"size": "10Mi"}))
        until(lambda: message() == "replicas is 0", explain=process.text)
        assert "retainedClaim" not in cluster.get("isvc", "weights")["status"]
        assert uid() == before
        # Asked for beforehand, it goes.
        cluster.apply(service("weights", replicas=0, cache={"size": "10Mi", "retain": False}))
        until(
            lambda: cluster.get("pvc", "weights-engine")["metadata"]["annotations"].get(
                "serving.leadline.io/retain"
            ),
            explain=process.text,
        )
        cluster.apply(service("weights", replicas=0))
        until(lambda: cluster.get("pvc", "weights-engine") is None, explain=process.text)


@pytest.mark.parametrize("served", ["Qwen/Qwen3-8B", "模型-" + "x" * 100, "a.B_c:d"])
def test_a_model_may_be_called_anything(cluster: Cluster, tmp_path: Path, served: str) -> None:
    with operator(cluster, tmp_path) as process:
        cluster.apply(service("named", servedName=served))
        until(lambda: is_ready(cluster, "named"), explain=process.text)
        assert cluster.get("isvc", "named")["status"]["servedName"] == served


def test_at_steady_state_nothing_is_written(cluster: Cluster, tmp_path: Path) -> None:
    with operator(cluster, tmp_path, "--resync-seconds=2") as process:
        # Quantities that the API server spells in its own way, and a foreign manager's fields.
        odd = service("calm", replicas=1, cache={"size": "1024Mi"})
        odd["spec"]["podTemplate"]["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "0.010"}}
        cluster.apply(odd, service("calm2", replicas=2))
        until(lambda: is_ready(cluster, "calm") and is_ready(cluster, "calm2"), explain=process.text)
        cluster.kubectl("annotate", "deploy", "calm-engine", "foreign=yes")
        before, looks = process.writes(), sum(process.metric("leadline_operator_reconciles_total").values())
        state = versions(cluster)
        until(lambda: sum(process.metric("leadline_operator_reconciles_total").values()) >= looks + 10)
        assert process.writes() == before, process.text()
        assert versions(cluster) == state
        assert sum(before.values()) <= 2 * 15, before
        assert cluster.get("deploy", "calm-engine")["metadata"]["annotations"]["foreign"] == "yes"
    with operator(cluster, tmp_path) as process:
        # A new process may apply once what is spelled in another way: writes that change nothing.
        until(lambda: sum(process.metric("leadline_operator_reconciles_total").values()) >= 2)
        assert versions(cluster) == state


def test_a_change_of_ours_is_put_right_and_a_deleted_child_comes_back(
    cluster: Cluster, tmp_path: Path
) -> None:
    with operator(cluster, tmp_path) as process:
        cluster.apply(service("held"))
        until(lambda: is_ready(cluster, "held"), explain=process.text)
        cluster.kubectl("delete", "pdb", "held-engine")
        cluster.kubectl("patch", "svc", "held-engine", "-p", json.dumps({"spec": {"selector": {"x": "y"}}}))
        until(lambda: cluster.get("pdb", "held-engine"), explain=process.text)

        def selector() -> Any:
            return cluster.get("svc", "held-engine")["spec"]["selector"]

        until(lambda: selector().get("serving.leadline.io/service") == "held", explain=process.text)
        # Also where what somebody sets excludes what we do.
        least = {"spec": {"minAvailable": 0, "maxUnavailable": None}}
        cluster.kubectl("patch", "pdb", "held-engine", "--type=merge", "-p", json.dumps(least))
        until(
            lambda: cluster.get("pdb", "held-engine")["spec"].get("maxUnavailable") == 1,
            explain=lambda: (cluster.ready("held"), process.text()),
        )
        assert "minAvailable" not in cluster.get("pdb", "held-engine")["spec"]
        # The labels by which children are watched and found are put back too, when somebody takes them away.
        for key in ("serving.leadline.io/service", "app.kubernetes.io/managed-by"):
            before = cluster.get("netpol", "held-engine")["metadata"]["labels"]
            cluster.kubectl("label", "netpol", "held-engine", f"{key}-")
            until(
                lambda before=before: cluster.get("netpol", "held-engine")["metadata"]["labels"] == before,
                explain=process.text,
            )


def test_a_service_that_is_made_again_at_once_does_not_trip_over_its_predecessor(
    cluster: Cluster, tmp_path: Path
) -> None:
    with operator(cluster, tmp_path) as process:
        cluster.apply(service("again"))
        until(lambda: is_ready(cluster, "again"), explain=process.text)
        cluster.kubectl("delete", "isvc", "again")
        cluster.apply(service("again", servedName="second"))
        until(lambda: is_ready(cluster, "again"), explain=process.text)
        uid = cluster.get("isvc", "again")["metadata"]["uid"]
        assert cluster.get("deploy", "again-engine")["metadata"]["ownerReferences"][0]["uid"] == uid
        assert "ApplyRefused" not in process.text()


def test_somebody_elses_object_of_our_name_is_not_taken_over(cluster: Cluster, tmp_path: Path) -> None:
    theirs = {"ports": [{"port": 80}], "selector": {"app": "theirs"}}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "mine-engine"}, "spec": theirs}
    )
    with operator(cluster, tmp_path) as process:
        cluster.apply(service("mine"))
        until(lambda: cluster.ready("mine").get("reason") == "NameTaken", explain=process.text)
        assert "Service mine-engine" in cluster.ready("mine")["message"]
        assert cluster.get("svc", "mine-engine")["spec"]["selector"] == {"app": "theirs"}
        assert cluster.get("deploy", "mine-engine") is None


def test_somebody_elses_secret_of_our_name_is_not_taken_over(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the chart of a Redis makes one for a release `mine`. The operator may not read Secrets."""
    monkeypatch.setenv("LEADLINE_REDIS_URL", "redis://:s3cret@redis:6379/0")
    theirs = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "mine-redis"}}
    cluster.apply({**theirs, "stringData": {"redis-password": "theirs"}})
    before = cluster.get("secret", "mine-redis")
    with operator(cluster, tmp_path) as process:
        cluster.apply(service("mine"))
        until(lambda: cluster.ready("mine").get("reason") == "NameTaken", explain=process.text)
        assert "Secret mine-redis" in cluster.ready("mine")["message"]
        cluster.kubectl("delete", "isvc", "mine", "--wait=true")
        assert cluster.get("secret", "mine-redis") == before
        # One of ours is written again, however often.
        cluster.apply(service("ours"))
        until(lambda: is_ready(cluster, "ours"), explain=process.text)
        cluster.apply(service("ours", servedName="new"))
        until(
            lambda: "=new" in json.dumps(cluster.get("deploy", "ours-engine")["spec"]), explain=process.text
        )
        until(lambda: is_ready(cluster, "ours"), explain=process.text)
        assert "NameTaken" not in str(cluster.get("isvc", "ours")["status"])
        assert cluster.get("secret", "ours-redis")["metadata"]["ownerReferences"]
        # One that somebody deleted is missed when a pod cannot start without it.
        cluster.kubectl("delete", "secret", "ours-redis")
        cluster.kubectl("delete", "pods", "--all", "--wait=false")
        until(lambda: cluster.get("secret", "ours-redis") is not None, explain=process.text)


def test_kubectl_scale_and_the_scale_subresource_work(cluster: Cluster, tmp_path: Path) -> None:
    with operator(cluster, tmp_path) as process:
        cluster.apply(service("wide"))
        until(lambda: is_ready(cluster, "wide"), explain=process.text)
        cluster.kubectl("scale", "isvc", "wide", "--replicas=3")
        until(lambda: cluster.get("isvc", "wide")["status"]["readyReplicas"] == 3, explain=process.text)
        path = (
            f"/apis/serving.leadline.io/v1alpha1/namespaces/{cluster.namespace}/inferenceservices/wide/scale"
        )
        scale = json.loads(cluster.kubectl("get", "--raw", path, namespaced=False))
        assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (3, 3)
        assert len(cluster.items("pods", "-l", scale["status"]["selector"])) == 3
        cluster.kubectl("scale", "isvc", "wide", "--replicas=0")
        until(lambda: cluster.ready("wide").get("reason") == "ScaledToZero", explain=process.text)


def test_an_apply_without_replicas_keeps_what_an_autoscaler_has_made_of_them(
    cluster: Cluster, tmp_path: Path
) -> None:
    path = f"/apis/serving.leadline.io/v1alpha1/namespaces/{cluster.namespace}/inferenceservices/kept/scale"

    def replicas() -> int | None:
        found: int | None = cluster.get("isvc", "kept")["spec"].get("replicas")
        return found

    with operator(cluster, tmp_path) as process:
        cluster.apply(service("kept"))
        until(lambda: replicas() == 1, explain=process.text)
        # Server-side, with a number: the one that the operator has written is nobody's, so no conflict.
        cluster.apply(service("kept", replicas=2), server_side=True)
        cluster.kubectl("scale", "isvc", "kept", "--replicas=3")
        until(lambda: cluster.get("deploy", "kept-engine")["status"].get("readyReplicas") == 3, 90)
        pods = {one["metadata"]["uid"] for one in cluster.items("pods")}
        # `kubectl replace`, and `kubectl apply` once the manifest has lost its number, take the field away.
        cluster.kubectl("replace", "-f", "-", text=json.dumps(service("kept")))
        until(lambda: replicas() == 3, explain=process.text)
        assert json.loads(cluster.kubectl("get", "--raw", path, namespaced=False))["spec"]["replicas"] == 3
        until(lambda: cluster.get("isvc", "kept")["status"]["observedGeneration"] > 3, explain=process.text)
        assert cluster.get("deploy", "kept-engine")["spec"]["replicas"] == 3
        assert {one["metadata"]["uid"] for one in cluster.items("pods")} == pods
        assert "fault of the operator" not in process.text()


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


def test_a_rollout_without_a_spare_gpu_goes_through(cluster: Cluster, tmp_path: Path) -> None:
    """P3: every GPU of the cluster is taken by the old pods, and the new image still gets in."""
    resource = "example.com/rollout-gpu"
    nodes = json.loads(cluster.kubectl("get", "nodes", "-o", "json", namespaced=False))["items"]
    node = next(one for one in nodes if not one["spec"].get("taints"))  # fake ones are tainted
    patch = {part: {resource: "2"} for part in ("capacity", "allocatable")}
    cluster.kubectl(
        *("patch", "node", node["metadata"]["name"], "--subresource=status", "--type=merge"),
        *("-p", json.dumps({"status": patch})),
        namespaced=False,
    )
    full = {"replicas": 2, "accelerator": {"type": "gpu", "resourceName": resource}}
    with operator(cluster, tmp_path) as process:
        cluster.apply(service("full", **full))
        until(lambda: is_ready(cluster, "full"), explain=process.text)
        cluster.apply(service("full", **full, servedName="new"))
        until(lambda: not is_ready(cluster, "full"), explain=process.text)
        until(lambda: is_ready(cluster, "full"), explain=process.text)
        # With a surge instead there is no place for the new pod, and the status says so.
        surge = {"maxSurge": 1, "maxUnavailable": 0, "drainSeconds": 0}
        cluster.apply(service("full", **full, servedName="newer", rollout=surge))
        until(lambda: cluster.ready("full").get("reason") == "RolloutBlocked", explain=process.text)
        conditions = {
            one["type"]: one["status"] for one in cluster.get("isvc", "full")["status"]["conditions"]
        }
        assert conditions["ModelAvailable"] == "True"


def test_changes_in_the_middle_of_rollouts_make_no_pod_too_many(cluster: Cluster, tmp_path: Path) -> None:
    """P4: whatever the operator's copy of the cluster says meanwhile."""
    spec = {"replicas": 2, "rollout": {"maxSurge": 1, "maxUnavailable": 0, "drainSeconds": 0}}

    def alive() -> list[dict[str, Any]]:
        found = cluster.items("pods", "-l", "serving.leadline.io/service=rolled")
        return [one for one in found if "deletionTimestamp" not in one["metadata"]]

    def names(pods: list[dict[str, Any]]) -> set[str]:
        return {one["metadata"]["name"] for one in pods}

    with operator(cluster, tmp_path) as process:
        cluster.apply(service("rolled", **spec))
        until(lambda: is_ready(cluster, "rolled"), explain=process.text)
        for number in range(4):
            before = names(alive())
            cluster.apply(service("rolled", **spec, servedName=f"v{number}"))

            # On to the next change as soon as a pod of this one is there, ready or not.
            def a_new_pod(before: set[str] = before) -> bool:
                pods = alive()
                assert len(pods) <= 3, f"more than replicas and surge: {sorted(names(pods))}"
                return bool(names(pods) - before)

            until(a_new_pod, explain=process.text)
        until(lambda: is_ready(cluster, "rolled"), explain=process.text)
        until(lambda: len(alive()) == 2, explain=process.text)
        assert len(cluster.items("deploy")) == 1
        assert "v3" in json.dumps(alive()[0]["spec"])
        assert "v3" in json.dumps(alive()[1]["spec"])


@pytest.mark.skipif(
    bool(os.environ.get("LEADLINE_E2E_SHARED")),
    reason="LEADLINE_E2E_SHARED is set: with the definition, everybody's services on this cluster would go",
)
def test_a_definition_that_is_deleted_takes_its_services_along_and_may_come_back(
    cluster: Cluster, tmp_path: Path
) -> None:
    """P6."""
    crd = "crd/inferenceservices.serving.leadline.io"
    process = OperatorProcess(cluster, tmp_path).wait_ready()
    try:
        cluster.apply(service("gone"))
        until(lambda: cluster.get("deploy", "gone-engine"), explain=process.text)
        cluster.kubectl("delete", crd, "--timeout=30s", namespaced=False)  # nothing holds it back
        install_definition()
        cluster.apply(service("gone"))
        uid = cluster.get("isvc", "gone")["metadata"]["uid"]

        def ours() -> bool:
            nonlocal process
            if process.process.poll() is not None:
                # It may give up with the sentence why; then a kubelet starts it again.
                assert "ERROR leadline.operator: watch ended" in process.text()
                process = OperatorProcess(cluster, tmp_path).wait_ready()
            found = cluster.get("deploy", "gone-engine")
            return bool(found) and found["metadata"]["ownerReferences"][0]["uid"] == uid

        # The collector of owned objects looks every 30 s for kinds that have gone and come.
        until(ours, 90, process.text)
        until(lambda: is_ready(cluster, "gone"), 60, process.text)
    finally:
        process.stop()


def test_nothing_is_written_into_a_namespace_that_is_being_deleted(cluster: Cluster, tmp_path: Path) -> None:
    """The operator's own Lease is elsewhere, as in life."""
    lease = f"lease-{cluster.namespace}"
    names = [f"n{number}" for number in range(12)]
    try:
        with operator(cluster, tmp_path, "--own-namespace=default", f"--lease-name={lease}") as process:
            cluster.apply(*(service(name, replicas=0) for name in names))
            until(
                lambda: all(cluster.ready(name).get("reason") == "ScaledToZero" for name in names),
                explain=process.text,
            )
            before = sum(process.writes().values())
            began = time.monotonic()
            cluster.kubectl("delete", "namespace", cluster.namespace, "--wait=false", namespaced=False)
            until(lambda: cluster.get("namespace", cluster.namespace) is None, 180, process.text)
            took, written = time.monotonic() - began, sum(process.writes().values()) - before
            until(lambda: not process.metric("leadline_operator_queue_length").get(""))
            # One attempt a worker at most finds out; without the note each service tries again and again.
            assert written <= 2 * len(names), (took, written, process.text())
            assert "again in" not in process.text()
            # A namespace of the same name is another: its services are looked at.
            cluster.kubectl("create", "namespace", cluster.namespace, namespaced=False)
            cluster.apply(service("fresh", replicas=0))
            until(lambda: cluster.ready("fresh").get("reason") == "ScaledToZero", explain=process.text)
    finally:
        cluster.kubectl("delete", "lease", lease, "-n", "default", namespaced=False)


def test_an_operator_that_is_killed_at_random_moments_converges(cluster: Cluster, tmp_path: Path) -> None:
    draw = random.Random(7)
    names = [f"k{number}" for number in range(6)]
    process = OperatorProcess(cluster, tmp_path).wait_ready()
    try:
        for number, name in enumerate(names):
            cluster.apply(service(name, replicas=1 + number % 2, engine={"warmupPrompts": [name]}))
            time.sleep(draw.random() * 0.4)  # the moment of the kill is the input of this test, not a wait
            process.stop(signal.SIGKILL)
            process = OperatorProcess(cluster, tmp_path).wait_ready()
        until(lambda: all(is_ready(cluster, name) for name in names), 120, process.text)
        for number, name in enumerate(names):
            mine = cluster.items(f"pods,{CHILDREN}", "-l", f"serving.leadline.io/service={name}")
            kinds = [one["kind"] for one in mine]
            assert sorted(set(kinds) - {"Pod"}) == sorted(kind for kind in kinds if kind != "Pod")
            assert kinds.count("Pod") == 1 + number % 2
    finally:
        process.stop()


def test_of_two_replicas_one_acts_and_the_other_takes_over(cluster: Cluster, tmp_path: Path) -> None:
    with operator(cluster, tmp_path) as one, operator(cluster, tmp_path) as two:
        cluster.apply(service("first"))
        until(lambda: is_ready(cluster, "first"), explain=one.text)
        leading = [process.metric("leadline_operator_leading")[""] for process in (one, two)]
        assert sorted(leading) == [0.0, 1.0]
        leader, follower = (one, two) if leading[0] else (two, one)
        assert leader.writes()
        assert not follower.writes()
        leader.stop(signal.SIGKILL)
        cluster.apply(service("second"))
        until(lambda: is_ready(cluster, "second"), explain=follower.text)
        assert follower.metric("leadline_operator_leading")[""] == 1.0
        # Nothing was done twice: the first one's objects are as the dead leader left them.
        assert len(cluster.items("deploy")) == 2


def test_requests_in_flight_scale_a_service_within_its_limits(cluster: Cluster, tmp_path: Path) -> None:
    busy = f"mkdir -p /tmp/w; echo leadline_engine_running_requests 70 >/tmp/w/metrics; {SERVES}"
    with operator(cluster, tmp_path, "--autoscale-seconds=1") as process:
        cluster.apply(service("busy", busy, autoscaling={"min": 1, "max": 3, "targetConcurrency": 32}))
        until(
            lambda: cluster.get("isvc", "busy").get("status", {}).get("readyReplicas") == 3, 90, process.text
        )
        found = cluster.get("isvc", "busy")
        assert found["spec"]["replicas"] == 3
        # The user's apply, which says nothing of replicas, does not take them back.
        cluster.apply(service("busy", busy, autoscaling={"min": 1, "max": 3, "targetConcurrency": 31}))
        assert cluster.get("isvc", "busy")["spec"]["replicas"] == 3


def gateway_pod(name: str, text: str) -> dict[str, Any]:
    """A stand-in for a replica of the gateway: it tells what it counts."""
    context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True}
    context |= {"runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    labels = {"app.kubernetes.io/name": "leadline", "app.kubernetes.io/component": "gateway"}
    command = f"mkdir /tmp/w; echo '{text}' >/tmp/w/metrics; exec httpd -f -p 8080 -h /tmp/w"
    container = {"name": "gateway", "image": "local/busybox:1", "command": ["sh", "-c", command]}
    spec = {"containers": [{**container, "securityContext": context}], "terminationGracePeriodSeconds": 1}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def test_the_gateways_count_goes_before_the_pods_and_all_its_replicas_count(
    cluster: Cluster, tmp_path: Path
) -> None:
    name = f"{cluster.namespace}/wanted"
    known = f'leadline_gateway_pods{{service="{name}"}} 1'
    count = f'{known}\nleadline_gateway_in_flight_requests{{service="{name}"}} 35'
    idle = f"mkdir -p /tmp/w; echo leadline_engine_running_requests 0 >/tmp/w/metrics; {SERVES}"
    cluster.apply(gateway_pod("gw-1", count), gateway_pod("gw-2", count))
    cluster.kubectl("wait", "--for=condition=Ready", "pod/gw-1", "pod/gw-2", "--timeout=60s")
    with operator(cluster, tmp_path, "--autoscale-seconds=1") as process:
        cluster.apply(service("wanted", idle, autoscaling={"min": 1, "max": 5, "targetConcurrency": 32}))
        until(lambda: cluster.get("isvc", "wanted")["spec"]["replicas"] == 3, 90, process.text)
        assert "Demand(low=70.0, high=70.0)" in process.text()


def test_the_pod_that_is_least_useful_goes_first(cluster: Cluster, tmp_path: Path) -> None:
    # Each pod says that it has as many requests as the last part of its address.
    busy = 'mkdir -p /tmp/w; echo "leadline_engine_running_requests ${POD_IP##*.}" >/tmp/w/metrics; '
    with operator(cluster, tmp_path) as process:
        cluster.apply(service("shrinks", busy + SERVES, replicas=3))
        until(lambda: is_ready(cluster, "shrinks"), explain=process.text)
        selector = ("-l", "serving.leadline.io/service=shrinks")

        def loads() -> list[int]:
            pods = cluster.items("pods", *selector)
            return sorted(int(one["status"]["podIP"].rpartition(".")[2]) for one in pods)

        before = loads()
        cluster.kubectl("scale", "isvc", "shrinks", "--replicas=1")
        until(lambda: len(cluster.items("pods", *selector)) == 1, explain=process.text)
        assert loads() == before[-1:]
        assert process.writes()['{kind="Pod",method="PATCH"}'] == 3
