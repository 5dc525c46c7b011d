"""Many InferenceServices at once: time until all are Ready, the operator's CPU and memory, its API writes,
and its writes in the minute after. Targets: 60 s, at most 15 writes a service, none in the minute after.
Needs a cluster that KUBECONFIG names, with the CRD and kwok's fake nodes (pods turn ready at once):

    ../shared/cluster/fake-nodes.sh DIR 50
    python benchmarks/operator_scale.py --services 200 --record
    python benchmarks/operator_scale.py --services 200 --floor      the same objects without an operator
    python benchmarks/operator_scale.py --services 300 --replicas 1 --delete --audit-log FILE --record

`--delete` deletes the namespace once the operator has reported on every service (pods may stay Pending, so it
needs no fake nodes) and prints the seconds until it is gone, the operator's writes meanwhile, and those that
the API server refused with 403. FILE is the API server's audit log, at level Metadata, with the writes of
KUBECONFIG's user.

The floor is what the cluster's own controllers need: kube-controller-manager asks at most 20 times a second
for each of its controllers by default (--kube-api-qps), and a new Deployment of two pods costs the deployment
controller and the ReplicaSet controller about 7 requests each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from leadline.operator.kube.api import KubeApi, load_configuration
from leadline.operator.kube.kinds import BY_KIND, SERVICE
from leadline.operator.planning.observed import Observed
from leadline.operator.planning.plan import plan
from leadline.operator.settings import OperatorSettings
from record import record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--services", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--quiet-seconds", type=float, default=60.0)
    parser.add_argument("--floor", action="store_true", help="apply the plan's objects; no operator")
    parser.add_argument("--delete", action="store_true", help="delete the namespace of services")
    parser.add_argument("--audit-log", type=Path, help="with --delete: the API server's, to count writes")
    parser.add_argument("--record", action="store_true", help="append to results.jsonl")
    args = parser.parse_args()
    if args.delete and args.audit_log is None:
        parser.error("--delete needs --audit-log")
    if not os.environ.get("KUBECONFIG"):
        print("set KUBECONFIG to a cluster with fake nodes; see the head of this file", file=sys.stderr)
        return 0
    namespace = f"scale-{os.getpid()}"
    _kubectl("create", "namespace", namespace)
    try:
        found = asyncio.run(_floor(namespace, args)) if args.floor else _measure(namespace, args)
    finally:
        _kubectl("delete", "namespace", namespace, "--wait=false", "--ignore-not-found")
    print(json.dumps(found, indent=2))
    if args.record:
        for unit, value in found.items():
            engine = "no operator" if args.floor else "operator"
            deleted = ", namespace deleted" if args.delete else ""
            workload = f"{args.services} InferenceServices of {args.replicas}{deleted}"
            record(workload, value, unit, engine=engine)
    return 0


def _measure(namespace: str, args: argparse.Namespace) -> dict[str, float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "leadline.cli.main", "operator", f"--port={port}"),
                *(f"--namespace={namespace}", "--own-namespace=default", "--operator-name=scale"),
                f"--lease-name={namespace}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _until(lambda: _metrics(port).get("leadline_operator_leading") == 1.0, 60)
            items = [_service(f"s{number}", args.replicas) for number in range(args.services)]
            began = time.monotonic()
            asyncio.run(_create(namespace, items))
            created = time.monotonic() - began
            if args.delete:
                return _deletion(namespace, port, args)
            ready = 'leadline_operator_services{reason="Ready"}'
            _until(lambda: _metrics(port).get(ready, 0) == args.services, 600)
            took = time.monotonic() - began
            usage = psutil.Process(process.pid)
            cpu, memory = sum(usage.cpu_times()[:2]), usage.memory_info().rss
            writes = _writes(port)
            time.sleep(args.quiet_seconds)
            later = _writes(port) - writes
        finally:
            process.terminate()
            process.wait(20)
            _kubectl("delete", "lease", namespace, "-n", "default", "--ignore-not-found")
    return {
        "s to all Ready": round(took, 1),
        "s of which creating them": round(created, 1),
        "CPU s of the operator": round(cpu, 1),
        "MiB of the operator": round(memory / 2**20, 1),
        "writes a service": round(writes / args.services, 2),
        f"writes in the next {args.quiet_seconds:.0f} s": later,
    }


def _deletion(namespace: str, port: int, args: argparse.Namespace) -> dict[str, float]:
    """Wait until the operator has said something of every service, then delete the namespace."""

    def settled() -> bool:
        found = _metrics(port)
        reported = sum(
            count for name, count in found.items() if name.startswith("leadline_operator_services{")
        )
        return reported == args.services and found.get("leadline_operator_queue_length") == 0

    _until(settled, 600)
    _until_quiet(port)
    before, size = _writes(port), args.audit_log.stat().st_size
    began = time.monotonic()
    _kubectl("delete", "namespace", namespace, "--timeout=600s")
    took = time.monotonic() - began
    _until_quiet(port)
    with args.audit_log.open("rb") as log:
        log.seek(size)
        asked = [json.loads(line) for line in log if b'"leadline-operator"' in line]
    ours = [one for one in asked if one.get("objectRef", {}).get("namespace") == namespace]
    codes = [one["responseStatus"]["code"] for one in ours if one["verb"] not in ("get", "list", "watch")]
    assert len(codes) == _writes(port) - before, "the audit log lacks writes of the user of KUBECONFIG"
    return {
        "s to delete the namespace": round(took, 1),
        "writes": len(codes),
        "writes refused with 403": codes.count(403),
    }


def _until_quiet(port: int) -> None:
    """Wait until nothing has been written for two seconds."""
    last, since = -1.0, time.monotonic()
    while time.monotonic() - since < 2:
        if (now := _writes(port)) != last:
            last, since = now, time.monotonic()
        time.sleep(0.1)


async def _floor(namespace: str, args: argparse.Namespace) -> dict[str, float]:
    """Time until the same children are there and all pods ready, when they are all applied at once."""
    api = KubeApi(await load_configuration())
    try:
        services = []
        for number in range(args.services):
            item = _service(f"s{number}", args.replicas)
            item["metadata"]["namespace"] = namespace
            # No operator looks at them; they own the children.
            services.append(await api.create(item, SERVICE))
        now, settings = datetime.now(UTC), OperatorSettings()
        plans = [plan(Observed(service, now), settings).desired or [] for service in services]
        began = time.monotonic()
        gate = asyncio.Semaphore(settings.workers)

        async def apply(one: dict[str, Any]) -> None:
            async with gate:
                await api.apply(one, BY_KIND[one["kind"]])

        await asyncio.gather(*(apply(one) for objects in plans for one in objects))
        applied = time.monotonic() - began
        selector = "app.kubernetes.io/managed-by=leadline-operator"
        while True:
            deployments, _ = await api.list(BY_KIND["Deployment"], namespace, selector)
            ready = sum(one.get("status", {}).get("readyReplicas", 0) == args.replicas for one in deployments)
            if ready == args.services:
                break
            if time.monotonic() - began > 600:
                raise SystemExit(f"{ready} of {args.services} Deployments are ready after 600 s")
            await asyncio.sleep(0.5)
        return {
            "s to all Ready": round(time.monotonic() - began, 1),
            "s of which applying the objects": round(applied, 1),
        }
    finally:
        await api.close()


def _service(name: str, replicas: int) -> dict[str, Any]:
    tolerations = [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]
    return {
        "apiVersion": "serving.leadline.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "labels": {"serving.leadline.io/operator": "scale"}},
        "spec": {
            "model": "hf://Qwen/Qwen3-8B",
            "replicas": replicas,
            "accelerator": {"tolerations": tolerations, "nodeSelector": {"leadline.test/fake": "true"}},
        },
    }


async def _create(namespace: str, items: list[dict[str, Any]]) -> None:
    """Faster than kubectl, which sends one after the other."""
    api = KubeApi(await load_configuration())
    try:
        for item in items:
            item["metadata"]["namespace"] = namespace
        await asyncio.gather(*(api.create(item, SERVICE) for item in items))
    finally:
        await api.close()


def _kubectl(*words: str) -> None:
    beside = Path(os.environ["KUBECONFIG"]).parent / "bin"
    path = f"{os.environ['PATH']}{os.pathsep}{beside}"
    subprocess.run(
        ["kubectl", *words],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PATH": path},
    )


def _metrics(port: int) -> dict[str, float]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return {}
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")
    }


def _writes(port: int) -> float:
    """All but renewals of the Lease."""
    return sum(
        value
        for name, value in _metrics(port).items()
        if name.startswith("leadline_operator_api_writes_total") and 'kind="Lease"' not in name
    )


def _until(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not reached within {seconds} s")
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
