"""The operator's role against what the operator asks: no right is missing, and none is left over.

Needs the API server's audit log, at level Metadata, on this machine:

    export LEADLINE_E2E_AUDIT_LOG=/tmp/a.log
    export APISERVER_FLAGS="--audit-policy-file=$PWD/tests/e2e/audit-policy.yaml --audit-log-path=/tmp/a.log"

in the environment of ../shared/cluster/up.sh. LEADLINE_E2E_API_SERVER=HOST:PORT names another API server of
the same cluster, for when only that one keeps a log.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest
import yaml
from real_cluster import CHART, Audit, Cluster, Namespace, values_here

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not os.environ.get("LEADLINE_E2E_AUDIT_LOG"),
        reason="LEADLINE_E2E_AUDIT_LOG is not set; the test's file says how to have the log",
    ),
]

Right = tuple[str, str, str]
"""Group, resource, verb."""


def service(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "serving.leadline.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "m"},
        "spec": {"model": "smollm2", "image": "leadline/none:none", **spec},
    }


def serving(replicas: int) -> dict[str, Any]:
    """One whose pods are ready, and say that they are idle."""
    tells = "mkdir -p /tmp/w; cd /tmp/w; echo ok >ready; echo ok >health; "
    tells += "echo leadline_engine_running_requests 0 >metrics; exec httpd -f -p 8000 -h /tmp/w"
    engine = {"name": "engine", "command": ["sh", "-c", tells], "lifecycle": {"$patch": "delete"}}
    pod = {"terminationGracePeriodSeconds": 1, "containers": [engine]}
    made = service(replicas=replicas, image="local/busybox:1", podTemplate={"spec": pod})
    return {**made, "metadata": {"name": "s"}}


def stands() -> dict[str, Any]:
    """One whose pods want a Secret that is not there."""
    volumes = [{"name": "s", "secret": {"secretName": "not-there"}}]
    engine = {"name": "engine", "volumeMounts": [{"name": "s", "mountPath": "/s"}]}
    made = service(podTemplate={"spec": {"volumes": volumes, "containers": [engine]}})
    return {**made, "metadata": {"name": "w"}}


def asked(audit: Audit) -> tuple[set[Right], list[str]]:
    """(rights used, requests that were forbidden). An apply that made something needed create as well."""
    used: set[Right] = set()
    forbidden = []
    for event in audit.events():
        about, status = event["objectRef"], event.get("responseStatus", {}).get("code")
        resource = "/".join(filter(None, (about["resource"], about.get("subresource"))))
        used.add((about.get("apiGroup", ""), resource, event["verb"]))
        if event["verb"] == "patch" and status == 201:
            used.add((about.get("apiGroup", ""), resource, "create"))
        # Not the status: admission says 403 too, as for a claim whose class cannot grow.
        if event.get("annotations", {}).get("authorization.k8s.io/decision") == "forbid":
            forbidden.append(f"{event['verb']} {event['requestURI']}")
    return used, forbidden


def granted() -> set[Right]:
    rules = yaml.safe_load((CHART / "files" / "operator-rules.yaml").read_text())
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    } | {("coordination.k8s.io", "leases", verb) for verb in ("get", "create", "update")}


def made(namespace: Namespace, kind: str, name: str) -> bool:
    found = namespace.get(kind, name)
    return found is not None and not found["metadata"].get("deletionTimestamp")


def test_the_operator_uses_every_right_it_has_and_lacks_none(cluster: Cluster) -> None:
    values = values_here(operator={"replicas": 2})
    if server := os.environ.get("LEADLINE_E2E_API_SERVER"):
        host, _, port = server.rpartition(":")
        values["operator"]["extraEnv"] = [
            {"name": "KUBERNETES_SERVICE_HOST", "value": host},
            {"name": "KUBERNETES_SERVICE_PORT", "value": port},
        ]
    with (
        cluster.namespace("system") as system,
        cluster.namespace("llm") as namespace,
        system.release("r", values, serves=(namespace,)),
    ):
        namespace.kubectl("apply", "-f", "-", text=json.dumps(stands()))
        # Every kind of child is made, changed, and, where a spec can do without, deleted.
        full = service(cache={"size": "1Gi", "retain": False}, engine={"warmupPrompts": ["Hello"]})
        namespace.kubectl("apply", "-f", "-", text=json.dumps(full))
        for kind, name in (
            ("pvc", "m-engine"),
            ("cm", "m-engine"),
            ("secret", "m-redis"),
            ("netpol", "m-engine"),
        ):
            namespace.until(f"{kind} {name} is made", lambda k=kind, n=name: made(namespace, k, n), 60)
        changed = service(
            cache={"size": "2Gi", "retain": False}, engine={"warmupPrompts": ["Hello", "Good day"]}
        )
        namespace.kubectl("apply", "-f", "-", text=json.dumps(changed))
        namespace.until(
            "the claim is asked to grow",
            lambda: (
                (namespace.get("pvc", "m-engine") or {})["spec"]["resources"]["requests"]["storage"] == "2Gi"
                or "m-engine" in json.dumps((namespace.get("isvc", "m") or {}).get("status", {}))
            ),
            60,
        )
        scaled = service(autoscaling={"min": 2, "max": 3})
        namespace.kubectl("apply", "-f", "-", text=json.dumps(scaled))
        namespace.until(
            "the autoscaler scales to its least",
            lambda: (namespace.get("isvc", "m") or {})["spec"].get("replicas") == 2,
            90,
        )
        for kind in ("pvc", "cm"):
            namespace.until(f"{kind} goes", lambda k=kind: not made(namespace, k, "m-engine"), 60)
        # Pods that serve are ranked before one of them goes.
        namespace.kubectl("apply", "-f", "-", text=json.dumps(serving(2)))
        namespace.until(
            "two pods serve",
            lambda: (namespace.get("isvc", "s") or {}).get("status", {}).get("readyReplicas") == 2,
            60,
        )
        namespace.kubectl("scale", "isvc", "s", "--replicas=1")
        namespace.until(
            "one pod is left",
            lambda: (namespace.get("isvc", "s") or {}).get("status", {}).get("replicas") == 1,
            60,
        )
        sleeping = serving(1)
        sleeping["spec"]["autoscaling"] = {"min": 0, "max": 2, "idleSeconds": 10}
        namespace.kubectl("apply", "-f", "-", text=json.dumps(sleeping))
        namespace.until(
            "the service falls asleep",
            lambda: (namespace.get("isvc", "s") or {}).get("spec", {}).get("replicas") == 0,
            120,
        )
        values["networkPolicy"] = {"enabled": False}
        if os.environ.get("LEADLINE_E2E_SHARED"):
            values["operator"]["extraArgs"] = [f"--namespace={one.name}" for one in (system, namespace)]
        system.helm("upgrade", "r", values=values)
        namespace.until("the policy goes", lambda: not made(namespace, "netpol", "m-engine"), 60)
        namespace.until(
            "the status says what does not mount",
            lambda: 'secret "not-there" not found' in str((namespace.get("isvc", "w") or {}).get("status")),
            60,
        )
        namespace.kubectl("delete", "isvc", "m", "s", "w", "--wait=true")

        audit = Audit(f"system:serviceaccount:{system.name}:r-leadline-operator")
        ends = time.monotonic() + 30
        while asked(audit)[0] != granted() and time.monotonic() < ends:
            time.sleep(0.5)
        used, forbidden = asked(audit)
        assert not forbidden, "rights that are missing"
        assert used - granted() == set(), "asked without a right, and granted by another role?"
        assert granted() - used == set(), "rights that are not used"
