"""An hf:// model in a real cluster: a hub in one pod, the download and the engine in another.

Needs KUBECONFIG, and the engine's image there (tests/e2e/images/load.sh; LEADLINE_E2E_IMAGES names another).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from cluster_tools import ROOT, Cluster, operator, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.usefixtures("images")]

IMAGE = os.environ.get("LEADLINE_E2E_IMAGES", "leadline/NAME:dev").replace("NAME", "engine")
SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def hub(cluster: Cluster) -> None:
    """A Service `hub` that serves hf://org/tiny to clients with the token of the Secret `hub`."""
    sources = (ROOT / "tests/operator/hub_in_a_pod.py", ROOT / "tests/engine/hub/fake_hub.py")
    container = {
        "name": "hub",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "/hub/hub_in_a_pod.py", "8000", "s3cret"],
        "readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1},
        "volumeMounts": [{"name": "hub", "mountPath": "/hub"}],
        "securityContext": SECURITY,
    }
    volumes = [{"name": "hub", "configMap": {"name": "hub"}}]
    spec = {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 1}
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "hub"},
            "data": {source.name: source.read_text() for source in sources},
        },
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "hub"},
            "stringData": {"token": "s3cret", "revoked": "revoked"},
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "hub", "labels": {"app": "hub"}},
            "spec": spec,
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "hub"},
            "spec": {"selector": {"app": "hub"}, "ports": [{"port": 80, "targetPort": 8000}]},
        },
    )
    cluster.kubectl("wait", "--for=condition=Ready", "pod/hub", "--timeout=55s")


def service(cluster: Cluster, name: str, model: str, host: str = "hub", **spec: Any) -> dict[str, Any]:
    mirror = {"name": "HF_ENDPOINT", "value": f"http://{host}.{cluster.namespace}"}
    pod = {"spec": {"initContainers": [{"name": "download", "env": [mirror]}]}}
    return {
        "apiVersion": "serving.leadline.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "labels": {"serving.leadline.io/operator": "tested"}},
        "spec": {"model": model, "image": IMAGE, "podTemplate": pod, "rollout": {"drainSeconds": 0}, **spec},
    }


def test_a_hub_model_is_downloaded_with_its_token_loaded_and_served_and_status_says_how_far_it_is(
    cluster: Cluster, tmp_path: Path
) -> None:
    hub(cluster)
    with operator(cluster, tmp_path) as process:
        tiny = service(
            cluster,
            "tiny",
            "hf://org/tiny",
            tokenSecretRef={"name": "hub"},
            cache={"size": "1Gi"},
            engine={"maxModelLen": 256, "extraArgs": ["--num-kv-blocks=64"]},
        )
        revoked = {"name": "hub", "key": "revoked"}
        cluster.apply(
            tiny,
            service(cluster, "secret", "hf://org/tiny"),
            service(cluster, "revoked", "hf://org/tiny", tokenSecretRef=revoked),
        )
        seen: list[str] = []

        def is_ready() -> bool:
            ready = cluster.ready("tiny")
            text = f"{ready.get('reason')} {ready.get('message')}"
            if text not in seen:
                seen.append(text)
            return bool(ready.get("status") == "True")

        until(is_ready, 150, lambda: (seen, process.text()[-2000:]))
        shares = [int(share) for text in seen for share in re.findall(r"^Downloading .*\((\d+) %\)", text)]
        assert len(shares) >= 2, seen
        assert shares == sorted(shares), seen
        assert any(text.startswith("LoadingWeights ") for text in seen), seen
        events = [one["reason"] for one in cluster.items("events") if one["involvedObject"]["name"] == "tiny"]
        assert {"Downloading", "LoadingWeights", "Ready"} <= set(events)
        # Without the token the hub says that there is no such model; the download's error has a type.
        refused = until(
            lambda: cluster.ready("secret").get("reason") == "ModelNotFound" and cluster.ready("secret")
        )
        assert "if it is private, set HF_TOKEN" in refused["message"]
        until(lambda: cluster.ready("revoked").get("reason") == "Unauthorized")
        assert "check HF_TOKEN" in cluster.ready("revoked")["message"]
        # A hub that is nowhere is no missing model; once it is there, it is found without a hand.
        cluster.apply(service(cluster, "late", "hf://org/tiny", host="later"))

        def late() -> str:
            return str(cluster.ready("late").get("reason"))

        until(lambda: late() == "ModelUnreachable", 60, lambda: cluster.ready("late"))
        assert re.search(
            r"the hub cannot be reached: .*; it is tried again$", cluster.ready("late")["message"]
        )
        ports = [{"port": 80, "targetPort": 8000}]
        found = {"selector": {"app": "hub"}, "ports": ports}
        cluster.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "later"}, "spec": found})
        until(lambda: late() == "ModelNotFound", 90, lambda: cluster.ready("late"))  # it has no token
        # A restart of the engine's container asks no hub.
        cluster.kubectl("delete", "pod", "hub", "--wait=true")
        pods = cluster.items("pods", "-l", "serving.leadline.io/service=tiny")
        (name,) = (one["metadata"]["name"] for one in pods)
        cluster.kubectl("exec", name, "-c", "engine", "--", "python", "-c", "import os; os.kill(1, 15)")

        def is_back() -> bool:
            status = json.loads(cluster.kubectl("get", "pod", name, "-o", "json"))["status"]
            (engine,) = status["containerStatuses"]
            return bool(engine["restartCount"] == 1 and engine["ready"])

        until(is_back, 90, process.text)
