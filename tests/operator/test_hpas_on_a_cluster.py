"""Kubernetes' own autoscalers on a service and on its Deployment, beside ours, on a real cluster.

Needs KUBECONFIG, and a node that has the image local/busybox:1 (../shared/cluster has one).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from cluster_tools import SERVES, Cluster, is_ready, operator, service, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def autoscaler(kind: str, name: str, least: int, most: int) -> dict[str, Any]:
    version = "apps/v1" if kind == "Deployment" else "serving.leadline.io/v1alpha1"
    cpu = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 50}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "auto"},
        "spec": {
            "scaleTargetRef": {"apiVersion": version, "kind": kind, "name": name},
            "minReplicas": least,
            "maxReplicas": most,
            "metrics": [{"type": "Resource", "resource": cpu}],
        },
    }


def test_a_horizontal_pod_autoscaler_finds_what_it_needs(cluster: Cluster, tmp_path: Path) -> None:
    with operator(cluster, tmp_path) as process:
        cluster.apply(service("auto"))
        until(lambda: is_ready(cluster, "auto"), explain=process.text)
        cluster.apply(autoscaler("InferenceService", "auto", 2, 3))

        def scales() -> bool:
            conditions = (cluster.get("hpa", "auto").get("status") or {}).get("conditions", [])
            return any(one["type"] == "AbleToScale" and one["status"] == "True" for one in conditions)

        until(scales, 60, lambda: cluster.get("hpa", "auto"))
        until(lambda: cluster.get("isvc", "auto")["status"]["readyReplicas"] >= 2, 90, process.text)


def test_our_autoscaling_rests_while_there_is_another_and_resumes_when_it_is_deleted(
    cluster: Cluster, tmp_path: Path
) -> None:
    busy = "mkdir -p /tmp/w; echo leadline_engine_running_requests 200 >/tmp/w/metrics; "
    seen: set[int] = set()

    def replicas() -> int:
        seen.add(int(cluster.get("isvc", "auto")["spec"]["replicas"]))
        return max(seen)

    cluster.apply(autoscaler("InferenceService", "auto", 2, 2))
    scaling = {"min": 1, "max": 3, "targetConcurrency": 31}
    with operator(cluster, tmp_path, "--autoscale-seconds=0.5") as process:
        cluster.apply(service("auto", busy + SERVES, autoscaling=scaling))
        until(lambda: replicas() == 2 and is_ready(cluster, "auto"), 90, process.text)
        # As many looks as the scaling below takes, several times over.
        looks = time.monotonic() + 3
        until(lambda: replicas() and time.monotonic() > looks)
        assert seen == {1, 2}
        assert "in flight" not in process.text()
        cluster.kubectl("delete", "hpa", "auto")
        until(lambda: replicas() == 3, 20, process.text)


def test_a_deployment_that_an_autoscaler_scaled_is_the_services_again_when_it_is_deleted(
    cluster: Cluster, tmp_path: Path
) -> None:
    def replicas() -> int:
        return int(cluster.get("deploy", "auto-engine")["spec"]["replicas"])

    def serve(number: int) -> bool:  # Ready may still be of the pods that there were
        status = cluster.get("isvc", "auto")["status"]
        return status["desiredReplicas"] == status["readyReplicas"] == number and is_ready(cluster, "auto")

    def looks() -> float:
        return sum(process.metric("leadline_operator_reconciles_total").values())

    with operator(cluster, tmp_path, "--autoscale-seconds=0.5") as process:
        cluster.apply(service("auto"))
        until(lambda: is_ready(cluster, "auto"), explain=process.text)
        cluster.apply(autoscaler("Deployment", "auto-engine", 2, 2))
        until(lambda: replicas() == 2 and serve(2), 90, process.text)
        # It looks again and again, and writes nothing but the Event of what it has just said.
        said = looks()
        until(lambda: looks() > said)
        before, seen = process.writes(), looks()
        until(lambda: looks() >= seen + 4)
        assert process.writes() == before, process.text()
        cluster.kubectl("delete", "hpa", "auto")
        until(lambda: replicas() == 1 and serve(1), 30, process.text)
