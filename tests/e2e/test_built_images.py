"""The images as the cluster has them: what is in them, how big they are, and that they run locked down."""

from __future__ import annotations

import json
import time

import pytest
from real_cluster import Cluster, image

# The first of the tests that need images: it waits for them where `.ci/run` builds them meanwhile.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

LIMITS_MB = {"operator": 230, "gateway": 400, "engine": 2200, "valkey": 210}
"""Of the CPU variants on the Debian of ../shared/cluster, which is 177 MB itself."""

LOOK = """
import importlib.metadata, json, os, pathlib, subprocess
writable = []
for folder in ("/", "/opt/leadline", "/usr/lib", "/etc", "/tmp"):
    try:
        (pathlib.Path(folder) / "probe").touch()
        writable.append(folder)
    except OSError:
        pass
done = subprocess.run(["leadline", "--help"], capture_output=True, text=True)
print(json.dumps({
    "packages": [one.name.lower().replace("_", "-") for one in importlib.metadata.distributions()],
    "user": os.getuid(), "writable": writable, "help": done.returncode, "said": done.stdout + done.stderr,
}))
"""


def test_images_hold_what_they_need_and_run_as_nobody_on_a_read_only_root(
    cluster: Cluster, images: str
) -> None:
    print(images[-600:])
    locked = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    names = ("operator", "gateway", "engine")
    containers = [
        {
            "name": name,
            "image": image(name),
            "imagePullPolicy": "IfNotPresent",
            "command": ["python3", "-c", LOOK],
            "securityContext": locked,
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        }
        for name in names
    ]
    # No runAsUser: the kubelet refuses an image whose own user is root, or is not a number.
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": containers,
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "look"}, "spec": spec}
    with cluster.namespace("images") as namespace:
        namespace.kubectl("create", "-f", "-", text=json.dumps(pod))

        def phase() -> str:
            return str((namespace.get("pod", "look") or {}).get("status", {}).get("phase"))

        namespace.until("the three have looked", lambda: phase() in ("Succeeded", "Failed"), 120)
        said = {name: namespace.kubectl("logs", "look", "-c", name) for name in names}
        assert phase() == "Succeeded", said
    found = {name: json.loads(text) for name, text in said.items()}
    for name, one in found.items():
        assert (one["user"], one["writable"], one["help"]) == (65532, ["/tmp"], 0), (name, one)
        assert "pip" not in one["packages"], f"{name}: pip is for the build stage"
    packages = {name: set(one["packages"]) for name, one in found.items()}
    heavy = {"torch", "transformers", "safetensors"}
    assert not heavy & packages["gateway"], "heavy packages in the gateway"
    assert not (heavy | {"tokenizers", "numpy", "fastapi", "redis"}) & packages["operator"]
    assert packages["engine"] >= {"torch", "transformers", "leadline"}
    assert not {"kopf", "kubernetes"} & packages["engine"]


def test_images_are_no_bigger_than_said(cluster: Cluster, images: str) -> None:
    def sizes() -> dict[str, float]:
        """Megabytes of those that the nodes know of."""
        nodes = json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"]
        known = {
            name: one["sizeBytes"] / 1e6
            for node in nodes
            for one in node["status"].get("images") or []
            for name in one.get("names") or []
        }
        found = {}
        for name in LIMITS_MB:
            ours = [size for full, size in known.items() if f"/{full}".endswith(f"/{image(name)}")]
            if ours:
                found[name] = max(ours)
        return found

    # Kubelets look at their images every half a minute, and the last one may just have come.
    ends = time.monotonic() + 120
    while len(found := sizes()) < len(LIMITS_MB) and time.monotonic() < ends:
        time.sleep(1)
    print({image(name): f"{size:.0f} MB" for name, size in found.items()})
    assert found.keys() == LIMITS_MB.keys(), "no node has the others"
    assert {name: size for name, size in found.items() if size > LIMITS_MB[name]} == {}, "these have grown"
