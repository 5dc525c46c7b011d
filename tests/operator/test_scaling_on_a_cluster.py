"""Replicas on a real cluster: `kubectl scale`, the autoscaler's demand, and the pod that goes first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster_tools import SERVES, Cluster, is_ready, operator, service, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


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
        # Server-side, with a number: the operator's own value has no owner, so there is no conflict.
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
        until(lambda: cluster.get("isvc", "wanted")["spec"].get("replicas") == 3, 90, process.text)
        assert "1 to 3 replicas: 70 requests in flight" in process.text()


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
