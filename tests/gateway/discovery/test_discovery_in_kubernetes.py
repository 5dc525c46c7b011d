"""Discovery against a real API server, kubelet and EndpointSlice controller.

Needs a cluster that KUBECONFIG names, with a node that has the image local/busybox:1 (../shared/cluster has).
The gateway's side runs with a service account that may do no more than it needs.
"""

import asyncio
import base64
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from leadline.gateway.config.file import read_config
from leadline.gateway.discovery.discovery import Discovery
from leadline.gateway.pods import eligible
from leadline.gateway.services import ServiceTable, build_table

pytestmark = pytest.mark.cluster

LABEL = "serving.leadline.io/service"


class Cluster:
    """A namespace of its own in the cluster, and a kubeconfig of a service account that may only watch."""

    def __init__(self, folder: Path) -> None:
        from kubernetes import client, config

        config.load_kube_config(os.environ["KUBECONFIG"])
        self.core, self.rbac = client.CoreV1Api(), client.RbacAuthorizationV1Api()
        self.namespace = f"discovery-{uuid.uuid4().hex[:8]}"
        self.core.create_namespace({"metadata": {"name": self.namespace}})
        self.core.create_namespaced_service_account(self.namespace, {"metadata": {"name": "gateway"}})
        rule = {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        }
        self.rbac.create_namespaced_role(self.namespace, {"metadata": {"name": "gateway"}, "rules": [rule]})
        self.rbac.create_namespaced_role_binding(
            self.namespace,
            {
                "metadata": {"name": "gateway"},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "gateway"},
                "subjects": [{"kind": "ServiceAccount", "name": "gateway", "namespace": self.namespace}],
            },
        )
        token = self.core.create_namespaced_service_account_token(
            "gateway", self.namespace, {"spec": {"expirationSeconds": 3600}}
        )
        (folder / "token").write_text(token.status.token)
        settings = client.Configuration.get_default_copy()
        authority = base64.b64encode(Path(settings.ssl_ca_cert).read_bytes()).decode()
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(
            f"""
            current-context: c
            contexts: [{{name: c, context: {{cluster: k, user: u, namespace: {self.namespace}}}}}]
            clusters:
            - name: k
              cluster: {{server: "{settings.host}", certificate-authority-data: {authority}}}
            users: [{{name: u, user: {{tokenFile: token}}}}]
            """
        )

    def service(self, name: str, *, labelled: bool = True) -> None:
        self.core.create_namespaced_service(
            self.namespace,
            {
                "metadata": {"name": name, "labels": {LABEL: name} if labelled else {}},
                "spec": {"selector": {"app": name}, "ports": [{"name": "http", "port": 8000}]},
            },
        )

    def pod(self, app: str, name: str, command: str = "sleep 1000", **container: Any) -> None:
        self.core.create_namespaced_pod(
            self.namespace,
            {
                "metadata": {"name": name, "labels": {"app": app}},
                "spec": {
                    "terminationGracePeriodSeconds": 8,
                    "containers": [
                        {
                            "name": "main",
                            "image": "local/busybox:1",
                            "imagePullPolicy": "IfNotPresent",
                            # No trap: process 1 ignores SIGTERM, so the pod is in termination for a while.
                            "command": ["sh", "-c", command],
                            **container,
                        }
                    ],
                },
            },
        )

    def delete_pod(self, name: str, seconds: int | None = None) -> None:
        self.core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=seconds)

    def close(self) -> None:
        self.core.delete_namespace(self.namespace)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


@asynccontextmanager
async def gateway(cluster: Cluster, **settings: Any) -> AsyncIterator[ServiceTable]:
    config = read_config(
        None,
        {
            "discovery": {"kind": "kubernetes", "trust": "labels", "kubeconfig": str(cluster.kubeconfig)},
            **settings,
        },
    )
    table = build_table(config)
    discovery = Discovery(config, table)
    await discovery.start()
    try:
        yield table
    finally:
        await discovery.close()


def states(table: ServiceTable, service: str) -> dict[str, str]:
    found = table.get(service)
    return {
        pod.id: "leaving" if pod.terminating else "ready" if pod.ready else "unready"
        for pod in (found.pods.values() if found else ())
    }


async def until(condition: Callable[[], object], seconds: float = 60.0) -> float:
    """Wait for a condition; how long it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"did not happen within {seconds} s"
        await asyncio.sleep(0.01)
    return time.monotonic() - started


async def test_pods_come_turn_ready_terminate_and_go(cluster: Cluster) -> None:
    name = f"{cluster.namespace}/llm"
    cluster.service("llm")
    async with gateway(cluster) as table:
        probe = {"exec": {"command": ["sh", "-c", "[ -e /ready ]"]}, "periodSeconds": 1}
        cluster.pod("llm", "a")
        cluster.pod("llm", "b", "sleep 3; echo > /ready; sleep 1000", readinessProbe=probe)
        await until(lambda: states(table, name) == {"a": "ready", "b": "unready"})
        await until(lambda: states(table, name) == {"a": "ready", "b": "ready"})
        service = table.get(name)
        assert service.pods["a"].address.endswith(":8000")

        cluster.delete_pod("a")
        waited = await until(lambda: states(table, name).get("a") != "ready")
        print(f"not routed to {waited * 1000:.0f} ms after its deletion")
        assert waited < 3
        assert [pod.id for pod in eligible(service.pods.values(), time.monotonic())] == ["b"]
        await until(lambda: states(table, name) == {"b": "ready"})


async def test_a_pod_made_again_under_its_name_is_another_pod(cluster: Cluster) -> None:
    name = f"{cluster.namespace}/llm"
    cluster.service("llm")
    cluster.pod("llm", "a-0")
    async with gateway(cluster) as table:
        await until(lambda: states(table, name) == {"a-0": "ready"})
        first = table.get(name).pods["a-0"]
        cluster.delete_pod("a-0", 0)
        await until(lambda: states(table, name) == {})
        cluster.pod("llm", "a-0")
        await until(lambda: states(table, name) == {"a-0": "ready"})
        assert table.get(name).pods["a-0"] is not first
        assert first.draining


async def test_services_come_go_and_are_found_by_name(cluster: Cluster) -> None:
    own = cluster.namespace
    entry = {"name": f"{own}/qwen", "kubernetes_service": "backend"}
    async with gateway(cluster, services=[entry]) as table:
        cluster.service("llm")
        cluster.service("backend", labelled=False)
        cluster.pod("backend", "x")
        await until(lambda: states(table, f"{own}/qwen") == {"x": "ready"})
        await until(lambda: table.get(f"{own}/llm") is not None)
        assert states(table, f"{own}/llm") == {}, "a service without pods is known: requests are held for it"
        cluster.core.delete_namespaced_service("llm", own)
        await until(lambda: table.get(f"{own}/llm") is None)
