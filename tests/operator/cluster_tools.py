"""A namespace of the real cluster that KUBECONFIG names, operators and gateways as processes, and kubectl."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SERVES = "mkdir -p /tmp/w; echo ok >/tmp/w/ready; echo ok >/tmp/w/health; exec httpd -f -p 8000 -h /tmp/w"
"""A stand-in for the engine image, which has no place on this test's path: it listens and is ready."""


class KubectlError(Exception):
    """What kubectl printed."""


def kubectl_path() -> str:
    beside = Path(os.environ.get("KUBECONFIG", "")).parent / "bin" / "kubectl"
    found = shutil.which("kubectl") or (str(beside) if beside.exists() else None)
    assert found, "kubectl is not on PATH"
    return found


class Cluster:
    def __init__(self) -> None:
        self.namespace = f"isvc-{uuid.uuid4().hex[:8]}"
        self.kubectl("create", "namespace", self.namespace, namespaced=False)
        # Every pod of these tests is thereby proved to pass the restricted level.
        self.kubectl(
            "label",
            "namespace",
            self.namespace,
            "pod-security.kubernetes.io/enforce=restricted",
            namespaced=False,
        )

    def close(self) -> None:
        gone = ("--wait=false", "--ignore-not-found")
        self.kubectl("delete", "namespace", self.namespace, *gone, namespaced=False)

    def kubectl(self, *words: str, namespaced: bool = True, text: str | None = None) -> str:
        command = [kubectl_path(), *(("-n", self.namespace) if namespaced else ()), *words]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise KubectlError(done.stderr.strip())
        return done.stdout

    def apply(self, *documents: dict[str, Any], server_side: bool = False) -> str:
        items = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        one = documents[0] if len(documents) == 1 else items
        side = ["--server-side"] if server_side else []
        return self.kubectl("apply", *side, "-f", "-", text=json.dumps(one))

    def get(self, *words: str) -> Any:
        """None if it does not exist."""
        try:
            return json.loads(self.kubectl("get", *words, "-o", "json"))
        except KubectlError as error:
            if "NotFound" in str(error):
                return None
            raise

    def items(self, kinds: str, *words: str) -> list[dict[str, Any]]:
        return list(self.get(kinds, *words)["items"])

    def ready(self, name: str) -> dict[str, Any]:
        """The Ready condition; empty if there is none."""
        found = self.get("isvc", name) or {}
        conditions = found.get("status", {}).get("conditions", [])
        return next((one for one in conditions if one["type"] == "Ready"), {})


def install_definition() -> None:
    """Apply the CRD, as generated, and wait until the API server has it."""
    for words in (
        ("apply", "-f", str(ROOT / "manifests/crd.yaml")),
        ("wait", "--for=condition=Established", "crd/inferenceservices.serving.leadline.io"),
    ):
        subprocess.run([kubectl_path(), *words], check=True, timeout=60)


def is_ready(cluster: Cluster, name: str) -> bool:
    """Whether the Ready condition of that service is True."""
    return cluster.ready(name).get("status") == "True"


CHILDREN = "deploy,svc,pdb,netpol,cm,pvc,sa"


def service(name: str, command: str = SERVES, **spec: Any) -> dict[str, Any]:
    """An InferenceService on the CPU whose engine container runs a shell command in busybox."""
    engine: dict[str, Any] = {"name": "engine", "command": ["sh", "-c", command]}
    return {
        "apiVersion": "serving.leadline.io/v1alpha1",
        "kind": "InferenceService",
        # Another operator may run in this cluster: it leaves these alone.
        "metadata": {"name": name, "labels": {"serving.leadline.io/operator": "tested"}},
        "spec": {
            "model": "smollm2",
            "image": "local/busybox:1",
            "rollout": {"drainSeconds": 0},
            "podTemplate": {
                "spec": {
                    "terminationGracePeriodSeconds": 1,
                    "containers": [
                        {**engine, "lifecycle": {"$patch": "delete"}, "imagePullPolicy": "IfNotPresent"}
                    ],
                }
            },
            **spec,
        },
    }


class OperatorProcess:
    """`leadline operator` on this machine, for one namespace."""

    def __init__(self, cluster: Cluster, folder: Path, *options: str) -> None:
        self.port = _free_port()
        self.log = folder / f"operator-{self.port}.log"
        self._file = self.log.open("w")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "leadline.cli.main", "operator", "--accelerator=cpu"),
                *(f"--namespace={cluster.namespace}", f"--own-namespace={cluster.namespace}"),
                *(f"--port={self.port}", "--lease-seconds=3", "--operator-name=tested"),
                # Many stand-ins for engines fit a small node.
                *("--cpu-requests=cpu=1m,memory=1Mi", "--gpu-requests=cpu=1m,memory=1Mi", *options),
            ],
            cwd=ROOT,
            stdout=self._file,
            stderr=subprocess.STDOUT,
        )

    def wait_ready(self) -> OperatorProcess:
        until(lambda: self._fetch("/ready") is not None, 30, self.text)
        return self

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(15)
        finally:
            self.process.kill()
            self._file.close()

    def text(self) -> str:
        return self.log.read_text()

    def metric(self, name: str) -> dict[str, float]:
        """Samples of a metric: labels as text → value."""
        text = self._fetch("/metrics") or ""
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return {line.rpartition(" ")[0].removeprefix(name): float(line.rpartition(" ")[2]) for line in lines}

    def writes(self) -> dict[str, float]:
        """Writes by method and kind, but for the Lease, which is renewed all the time."""
        found = self.metric("leadline_operator_api_writes_total")
        return {labels: count for labels, count in found.items() if 'kind="Lease"' not in labels}

    def _fetch(self, path: str) -> str | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=2) as answer:
                return str(answer.read().decode())
        except OSError:
            return None


@contextlib.contextmanager
def operator(cluster: Cluster, folder: Path, *options: str) -> Iterator[OperatorProcess]:
    started = OperatorProcess(cluster, folder, *options)
    try:
        yield started.wait_ready()
    finally:
        started.stop()


class GatewayProcess:
    """`leadline gateway` on this machine, for the services of one namespace. It holds no request."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        settings = {
            "server": {"host": "127.0.0.1", "port": 0},
            "discovery": {"kind": "kubernetes", "namespace": cluster.namespace, "operator": "tested"},
            "admission": {"hold_without_pods_seconds": 0},
        }
        config, self.log = folder / "gateway.json", folder / "gateway.log"
        config.write_text(json.dumps(settings))
        self._file = self.log.open("w")
        command = [sys.executable, "-m", "leadline.cli.main", "gateway", f"--config={config}"]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=self._file, stderr=subprocess.STDOUT)

    def wait_ready(self) -> GatewayProcess:
        found = until(lambda: re.search(r" at (http://\S+)\n", self.log.read_text()), 30, self.log.read_text)
        self.url = found[1]
        return self

    def chat(self, model: str) -> tuple[int, dict[str, Any]]:
        """Send a short chat; return status and body of the answer."""
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}]}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return int(answer.status), json.load(answer)
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, json.load(refusal)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(15)
        finally:
            self.process.kill()
            self._file.close()


@contextlib.contextmanager
def gateway(cluster: Cluster, folder: Path) -> Iterator[GatewayProcess]:
    started = GatewayProcess(cluster, folder)
    try:
        yield started.wait_ready()
    finally:
        started.stop()


def until(condition: Callable[[], Any], seconds: float = 60, explain: Callable[[], Any] | None = None) -> Any:
    """What `condition` returns once it is true; asked a few times a second."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, (
            f"did not happen in {seconds} s: {explain() if explain else condition}"
        )
        time.sleep(0.2)
    return found


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
