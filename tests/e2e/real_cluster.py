"""The cluster that KUBECONFIG names, by way of its own tools: kubectl, and helm for the chart.

A test works in a namespace of its own, which admits restricted pods only, and waits for conditions. When one
does not come, the failure says what the namespace looked like: pods, events, the last lines of the logs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

__all__ = ["CHART", "ROOT", "Audit", "Cluster", "Namespace", "image", "values_here"]

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "leadline"
RESTRICTED = {
    f"pod-security.kubernetes.io/{mode}": level
    for mode, level in (("enforce", "restricted"), ("warn", "restricted"))
}
_OUR_IMAGES = ("engine", "engine-cpu", "gateway", "operator", "valkey")


def image(name: str) -> str:
    """Where the cluster has an image of ours: LEADLINE_E2E_IMAGES, with `NAME` to be replaced. Engines here
    all run on the CPU."""
    assert name in _OUR_IMAGES
    name = "engine" if name == "engine-cpu" else name
    return os.environ.get("LEADLINE_E2E_IMAGES", "leadline/NAME:dev").replace("NAME", name)


def values_here(**more: Any) -> dict[str, Any]:
    """Values of the chart for this cluster: its images, engines on the CPU, a gateway that this machine can
    reach. `more` goes over them."""

    def reference(name: str) -> dict[str, str]:
        repository, _, tag = image(name).rpartition(":")
        return {"repository": repository, "tag": tag}

    values: dict[str, Any] = {
        "engine": {
            "image": reference("engine"),
            "cpuImage": reference("engine-cpu"),
            "accelerator": "cpu",
            "requests": {"cpu": {"cpu": "100m", "memory": "512Mi"}},
        },
        "operator": {"image": reference("operator")},
        "gateway": {
            "image": reference("gateway"),
            "replicas": 1,
            "service": {"type": "NodePort"},
            "drainSeconds": 10,
        },
        "valkey": {"image": reference("valkey")},
    }
    return _merged(values, more)


def _merged(below: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result


class Audit:
    """What a user asks of the API server, one event a request, oldest first, by its audit log:
    LEADLINE_E2E_AUDIT_LOG, as test_operator_rights.py says."""

    def __init__(self, user: str) -> None:
        self._user = user
        self._path = os.environ["LEADLINE_E2E_AUDIT_LOG"]
        self._read_to = 0
        self._events: list[dict[str, Any]] = []

    def events(self) -> list[dict[str, Any]]:
        """All so far."""
        with open(self._path, "rb") as file:
            file.seek(self._read_to)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # half written
                self._read_to += len(line)
                if self._user.encode() in line:
                    event = json.loads(line)
                    if event["user"]["username"] == self._user and "objectRef" in event:
                        self._events.append(event)
        return self._events


class Cluster:
    """kubectl and helm against one kubeconfig."""

    def __init__(self, kubeconfig: str) -> None:
        # ../shared/cluster puts the tools beside its kubeconfig.
        self._path = f"{os.environ.get('PATH', '')}{os.pathsep}{Path(kubeconfig).parent / 'bin'}"
        self.environment = {**os.environ, "KUBECONFIG": kubeconfig, "PATH": self._path}

    def tool(self, name: str, *args: str, text: str | None = None, check: bool = True) -> str:
        """Output of a tool. Raises AssertionError with what it wrote to standard error."""
        program = shutil.which(name, path=self._path)
        assert program, f"{name} is neither on PATH nor beside the kubeconfig"
        done = subprocess.run(
            [program, *args], input=text, capture_output=True, text=True, env=self.environment, timeout=300
        )
        if check and done.returncode:
            raise AssertionError(f"{name} {' '.join(args)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def kubectl(self, *args: str, text: str | None = None, check: bool = True) -> str:
        return self.tool("kubectl", *args, text=text, check=check)

    def helm(self, *args: str, check: bool = True) -> str:
        return self.tool("helm", *args, check=check)

    @contextmanager
    def namespace(self, prefix: str) -> Iterator[Namespace]:
        """A namespace of its own for a test, deleted afterwards; kept where LEADLINE_E2E_KEEP is set."""
        name = f"{prefix}-{uuid.uuid4().hex[:6]}"
        document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}}
        self.kubectl("create", "-f", "-", text=json.dumps(document))
        try:
            yield Namespace(self, name)
        finally:
            if not os.environ.get("LEADLINE_E2E_KEEP"):
                # An operator that comes next must not meet services in a namespace that is going.
                self.kubectl("-n", name, "delete", "isvc", "--all", "--timeout=60s", check=False)
                self.kubectl("delete", "namespace", name, "--wait=false")


class Namespace:
    """One namespace of the cluster."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name

    def kubectl(self, *args: str, text: str | None = None, check: bool = True) -> str:
        return self.cluster.kubectl("-n", self.name, *args, text=text, check=check)

    def apply(self, documents: str | Iterable[dict[str, Any]]) -> None:
        """YAML, or documents, with the images that this cluster has in place of the published ones."""
        loaded = list(yaml.safe_load_all(documents)) if isinstance(documents, str) else list(documents)
        self.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(own_images(loaded)))

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """None: there is none."""
        found: dict[str, Any] | None = json.loads(
            self.kubectl("get", kind, name, "-o", "json", "--ignore-not-found") or "null"
        )
        return found

    def items(self, kinds: str, selector: str = "") -> list[dict[str, Any]]:
        text = self.kubectl("get", kinds, "-o", "json", *(["-l", selector] if selector else []))
        found: list[dict[str, Any]] = json.loads(text)["items"]
        return found

    def until(self, what: str, condition: Callable[[], Any], seconds: float = 180.0) -> float:
        """Wait for a condition; how long it took. A failure describes the namespace."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > seconds:
                raise AssertionError(f"not within {seconds:.0f} s: {what}\n{self.describe()}")
            time.sleep(0.2)
        return time.monotonic() - began

    def rolled_out(self, deployment: str, seconds: float = 180.0) -> float:
        """Wait until all pods of a Deployment are ready."""

        def ready() -> bool:
            found = self.get("deployment", deployment) or {}
            status, wanted = found.get("status", {}), found.get("spec", {}).get("replicas", 1)
            observed = status.get("observedGeneration") == found.get("metadata", {}).get("generation")
            return bool(
                observed and status.get("readyReplicas", 0) == status.get("updatedReplicas", 0) == wanted
            )

        return self.until(f"deployment {deployment} is ready", ready, seconds)

    @contextmanager
    def release(
        self, name: str, values: dict[str, Any], *, serves: tuple[Namespace, ...] = ()
    ) -> Iterator[float]:
        """The chart installed here, ready; uninstalled afterwards. Yields the seconds that it took.

        Where LEADLINE_E2E_SHARED is set, others use this cluster too: the operator then looks only at this
        namespace and those of `serves`, though its rights are for all."""
        if os.environ.get("LEADLINE_E2E_SHARED") and not values.get("namespaced"):
            watched = [f"--namespace={one.name}" for one in (self, *serves)]
            more = values.get("operator", {}).get("extraArgs", [])
            values = _merged(values, {"operator": {"extraArgs": [*more, *watched]}})
        began = time.monotonic()
        try:
            self.helm("install", name, values=values)
            yield time.monotonic() - began
        finally:
            if not os.environ.get("LEADLINE_E2E_KEEP"):
                self.cluster.helm("uninstall", name, "-n", self.name, "--wait", "--timeout=120s", check=False)

    def helm(self, verb: str, name: str, *, values: dict[str, Any]) -> None:
        """`helm install` or `helm upgrade`, until everything is ready. A failure describes the namespace."""
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(values, file)
            file.flush()
            try:
                self.cluster.helm(
                    verb, name, str(CHART), "-n", self.name, "-f", file.name, "--wait", "--timeout=120s"
                )
            except AssertionError as error:
                raise AssertionError(f"{error}\n{self.describe()}") from None

    def node_port(self, service: str) -> str:
        """URL of a NodePort service; LEADLINE_E2E_NODE names the node where it is not this machine."""
        found = self.get("service", service)
        assert found is not None
        host = os.environ.get("LEADLINE_E2E_NODE", "127.0.0.1")
        return f"http://{host}:{found['spec']['ports'][0]['nodePort']}"

    def python(self, name: str, code: str, *args: str, labels: dict[str, str] | None = None) -> str:
        """Return what a program prints in a pod of this namespace without an owner (or with the labels
        given). Raises AssertionError when it fails."""
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels or {"app": "stranger"}},
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": 65532,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [
                    {
                        "name": "main",
                        "image": image("gateway"),
                        "imagePullPolicy": "IfNotPresent",
                        "command": ["python3", "-c", code, *args],
                        "securityContext": {
                            "allowPrivilegeEscalation": False,
                            "capabilities": {"drop": ["ALL"]},
                        },
                    }
                ],
            },
        }
        self.kubectl("create", "-f", "-", text=json.dumps(pod))

        def phase() -> str:
            return str((self.get("pod", name) or {}).get("status", {}).get("phase"))

        self.until(f"pod {name} ends", lambda: phase() in ("Succeeded", "Failed"), 60)
        said, ended = self.kubectl("logs", name), phase()
        self.kubectl("delete", "pod", name, "--wait=true", "--grace-period=1")
        assert ended == "Succeeded", said
        return said

    def describe(self) -> str:
        """For a person who reads why a test failed."""
        parts = [self.kubectl("get", "pods,isvc", "-o", "wide", check=False)]
        parts += self.kubectl("get", "events", "--sort-by=.lastTimestamp", check=False).splitlines()[-15:]
        for pod in self.kubectl("get", "pods", "-o", "name", check=False).split():
            log = self.kubectl("logs", pod, "--all-containers", "--tail=15", check=False)
            parts.append(f"-- {pod}\n{log}")
        return "\n".join(parts)


def own_images(documents: Any) -> Any:
    """The same documents with `image: leadline/x:…` and `valkey/valkey:…` as this cluster has them."""
    if isinstance(documents, list):
        return [own_images(one) for one in documents]
    if not isinstance(documents, dict):
        return documents
    changed = {key: own_images(value) for key, value in documents.items()}
    named = changed.get("image")
    if isinstance(named, str):
        short = named.partition(":")[0].rpartition("/")[2]
        if short in _OUR_IMAGES:
            changed["image"] = image(short)
    return changed
