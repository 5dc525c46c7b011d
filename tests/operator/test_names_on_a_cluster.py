"""Names on a real API server: operator, discovery of a gateway, and a tenant who tries to take one."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from cluster_tools import SERVES, Cluster, operator, service, until

from leadline.gateway.config.file import read_config
from leadline.gateway.discovery.discovery import Discovery
from leadline.gateway.errors import NoPods, UnknownModel
from leadline.gateway.services import build_table

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def names(cluster: Cluster, name: str) -> list[str]:
    found = cluster.get("isvc", name) or {}
    return list(found.get("status", {}).get("names") or [])


def forged(cluster: Cluster) -> list[dict[str, Any]]:
    """What a tenant may make: a Service with our labels, and a pod behind it."""
    ours = {"serving.leadline.io/service": "victim", "serving.leadline.io/operator": "tested"}
    labels = ours | {"app": "thief"}
    level = {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {
        "securityContext": level,
        "containers": [
            {
                "name": "engine",
                "image": "local/busybox:1",
                "imagePullPolicy": "IfNotPresent",
                "command": ["sh", "-c", SERVES],
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
        ],
    }
    port = {"name": "http", "port": 8000}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "aaa-thief", "labels": labels},
            "spec": {"clusterIP": "None", "selector": {"app": "thief"}, "ports": [port]},
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "thief", "labels": {"app": "thief"}},
            "spec": pod,
        },
    ]


async def led(cluster: Cluster, *wanted: str) -> dict[str, tuple[str, list[str]] | None]:
    """Where a gateway that starts now leads each name: service and its pods."""
    config = read_config(
        None,
        {
            "discovery": {
                "kind": "kubernetes",
                "kubeconfig": os.environ["KUBECONFIG"],
                "namespace": cluster.namespace,
                "operator": "tested",
            }
        },
    )
    table = build_table(config)
    discovery = Discovery(config, table)
    await discovery.start()
    found: dict[str, tuple[str, list[str]] | None] = {}
    for name in wanted:
        try:
            one = table.resolve(name)
            found[name] = one.name.partition("/")[2], sorted(one.pods)
        except (UnknownModel, NoPods):
            found[name] = None
    await discovery.close()
    return found


def test_a_name_stays_with_its_first_claim_through_every_way_to_take_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    with operator(cluster, tmp_path, "--gateway-url=http://gw") as process:
        # An old service without the name, then the holder.
        cluster.apply(service("aaa", replicas=0))
        until(lambda: names(cluster, "aaa"), explain=process.text)
        cluster.apply(service("victim", servedName="chat"))
        until(lambda: cluster.ready("victim").get("status") == "True", explain=process.text)
        # The old one takes the name into its aliases, a new one is called so, a tenant forges a Service.
        cluster.apply(service("aaa", replicas=0, aliases=["chat", "free"]))
        cluster.apply(service("bbb", servedName="chat", replicas=0))
        cluster.apply(*forged(cluster))
        until(lambda: "free" in names(cluster, "aaa") and names(cluster, "bbb"), explain=process.text)
        until(lambda: cluster.get("pod", "thief")["status"].get("podIP"))
        process.process.send_signal(signal.SIGKILL)
    with operator(cluster, tmp_path, "--gateway-url=http://gw") as process:
        own = f"{cluster.namespace}/{{}}".format
        assert names(cluster, "victim") == ["chat", own("victim")]
        assert names(cluster, "aaa") == ["aaa", "free", own("aaa")]
        assert names(cluster, "bbb") == [own("bbb")]
        conditions = cluster.get("isvc", "bbb")["status"]["conditions"]
        (said,) = [one for one in conditions if one["type"] == "NamesAccepted"]
        assert (said["status"], said["reason"]) == ("False", "NameTaken")
        assert f"'chat' belongs to {own('victim')}" in said["message"]
        warnings = [one for one in cluster.items("events") if one["reason"] == "NameTaken"]
        assert {one["involvedObject"]["name"] for one in warnings} == {"aaa", "bbb"}
        assert all(one["type"] == "Warning" and own("victim") in one["message"] for one in warnings)

        (pod,) = [
            one["metadata"]["name"]
            for one in cluster.items("pods", "-l", "app.kubernetes.io/managed-by=leadline-operator")
        ]
        leads = asyncio.run(led(cluster, "chat", "free", own("bbb"), "bbb", "thief"))
        assert leads == {
            "chat": ("victim", [pod]),
            "free": ("aaa", []),
            own("bbb"): ("bbb", []),
            "bbb": None,
            "thief": None,
        }

        # The holder goes: the oldest of the others has the name.
        cluster.kubectl("delete", "isvc", "victim")
        until(lambda: "chat" in names(cluster, "aaa"), explain=process.text)
        assert "chat" not in names(cluster, "bbb")
