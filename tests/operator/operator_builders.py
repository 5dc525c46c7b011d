"""Objects as the API server has them, for the operator's tests."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from leadline.operator.planning.observed import Observed
from leadline.operator.planning.plan import Plan, plan
from leadline.operator.settings import OperatorSettings

NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)
SETTINGS = OperatorSettings(engine_image="engine:1", engine_cpu_image="engine-cpu:1", own_namespace="system")
GPU = "nvidia.com/gpu"


def service(spec: dict[str, Any] | None = None, *, name: str = "qwen", **more: Any) -> dict[str, Any]:
    return {
        "apiVersion": "serving.leadline.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": "uid-1",
            "generation": 1,
            "resourceVersion": "1",
        },
        "spec": {"model": "hf://Qwen/Qwen3-8B", **(spec or {})},
        **more,
    }


def observed(spec: dict[str, Any] | None = None, **more: Any) -> Observed:
    return Observed(service(spec), NOW, **more)


def plan_of(spec: dict[str, Any] | None = None, settings: OperatorSettings = SETTINGS, **more: Any) -> Plan:
    return plan(observed(spec, **more), settings)


def wanted(made: Plan, kind: str) -> dict[str, Any]:
    found = [one for one in made.desired or [] if one["kind"] == kind]
    assert len(found) == 1, [one["kind"] for one in made.desired or []]
    return found[0]


def pod_spec(made: Plan) -> dict[str, Any]:
    spec: dict[str, Any] = wanted(made, "Deployment")["spec"]["template"]["spec"]
    return spec


def volume(spec: dict[str, Any], name: str) -> dict[str, Any]:
    """The volume of that name in a pod's spec."""
    return next(one for one in spec["volumes"] if one["name"] == name)


def container(made: Plan) -> dict[str, Any]:
    (engine,) = pod_spec(made)["containers"]
    return engine


def download(made: Plan) -> dict[str, Any]:
    """The init container that fetches the model."""
    (found,) = pod_spec(made)["initContainers"]
    return found


def environment(made: Plan, of: Callable[[Plan], dict[str, Any]] = container) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in of(made)["env"]}


def deployment(
    replicas: int = 1, updated: int | None = None, total: int | None = None, **status: Any
) -> dict[tuple[str, str], dict[str, Any]]:
    """As `Observed.children`: a Deployment of ours whose controller has seen the newest generation."""
    updated = replicas if updated is None else updated
    return {
        ("Deployment", "qwen-engine"): {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {
                "name": "qwen-engine",
                "namespace": "team",
                "uid": "uid-d",
                "generation": 3,
                "ownerReferences": [{"uid": "uid-1", "controller": True}],
            },
            "spec": {"replicas": replicas},
            "status": {
                "observedGeneration": 3,
                "replicas": updated if total is None else total,
                "updatedReplicas": updated,
                **status,
            },
        }
    }


def pod(name: str = "p1", *, ready: bool = False, **status: Any) -> dict[str, Any]:
    """A scheduled pod; `status` is put over."""
    return {
        "metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}"},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Ready", "status": "True" if ready else "False"},
            ],
            "containerStatuses": [running(ready=ready)],
            **status,
        },
    }


def running(*, ready: bool = False, restarts: int = 0, last: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "name": "engine",
        "image": "engine:1",
        "ready": ready,
        "restartCount": restarts,
        "state": {"running": {"startedAt": "2026-11-30T11:59:00Z"}},
        "lastState": {"terminated": last} if last else {},
    }


def waiting(reason: str, message: str = "", *, last: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "name": "engine",
        "image": "engine:1",
        "ready": False,
        "restartCount": 1 if last else 0,
        "state": {"waiting": {"reason": reason, "message": message}},
        "lastState": {"terminated": last} if last else {},
    }


def ended(code: int = 1, message: str = "", reason: str = "Error") -> dict[str, Any]:
    return {"exitCode": code, "reason": reason, "message": message}


def unschedulable(message: str, name: str = "p1") -> dict[str, Any]:
    made = pod(name, phase="Pending", containerStatuses=[])
    made["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    ]
    return made


def condition(made: Plan, kind: str = "Ready") -> dict[str, Any]:
    return next(one for one in made.status["conditions"] if one["type"] == kind)
