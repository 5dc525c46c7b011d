"""What was seen of one InferenceService: the input of `plan`."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from leadline.operator.planning.served_names import Names
from leadline.protocol.isvc import ASLEEP_ANNOTATION

__all__ = [
    "Observed",
    "ScalingReport",
    "StartReport",
    "Target",
    "active_pods",
    "is_asleep",
    "owned_by_autoscaler",
    "owner_of",
    "was_autoscaled",
]


class Target(NamedTuple):
    """What an autoscaler scales."""

    group: str
    kind: str
    namespace: str
    name: str


@dataclass(slots=True, frozen=True)
class StartReport:
    """The own report of a pod that runs and is not ready (engine/README.md, "What a server says while it
    starts")."""

    message: str = ""
    """Why it is not ready, in a line."""
    phase: str = ""
    """downloading, loading weights, …; empty where it does not start, or does not say."""
    fraction: float | None = None
    """Share of the phase that is done."""
    detail: str = ""


@dataclass(slots=True, frozen=True)
class ScalingReport:
    """What the built-in autoscaler does for a service."""

    active: bool
    """False: it steps aside."""
    message: str = ""
    """Its last decision, or why it steps aside; empty: it has decided nothing since this process began."""


@dataclass(slots=True)
class Observed:
    service: dict[str, Any]
    """The InferenceService as the API server has it."""
    now: datetime
    """UTC; what conditions that change now are stamped with."""
    children: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    """(kind, name) → object, of all that carries the service's label and of all that stands in the way of a
    name of ours."""
    pods: list[dict[str, Any]] = field(default_factory=list)
    progress: dict[str, StartReport] = field(default_factory=dict)
    """Pod uid → what it said at its last step, of pods that run and are not ready."""
    autoscaled: frozenset[Target] | None = None
    """What autoscalers scale in the service's namespace; None where that is not known."""
    pod_events: dict[str, str] = field(default_factory=dict)
    """Pod uid → what Events say is in its way, of pods that stand before their containers can start."""
    names: Names = field(default_factory=Names)
    """Names for clients that the service has, and those that it claims and does not have."""
    scaling: ScalingReport | None = None
    """Of a service with `autoscaling`; None: the autoscaler has not looked at it yet."""
    limited: frozenset[str] = frozenset()
    """Resources that LimitRanges of the namespace give to containers that do not ask for them."""
    refusal: str = ""
    """What the API server said when it refused one of the objects that are wanted."""

    @property
    def uid(self) -> str:
        return str(self.service["metadata"].get("uid", ""))

    @property
    def deployment(self) -> dict[str, Any] | None:
        return next((child for (kind, _), child in self.children.items() if kind == "Deployment"), None)

    @property
    def claim(self) -> dict[str, Any] | None:
        """The claim that `cache.size` made."""
        owned = (
            child
            for (kind, _), child in self.children.items()
            if kind == "PersistentVolumeClaim" and owner_of(child) == self.uid
        )
        return next(owned, None)


def owner_of(child: dict[str, Any]) -> str:
    """Uid of an object's controller; empty without one."""
    owners = child["metadata"].get("ownerReferences") or []
    return str(next((one.get("uid", "") for one in owners if one.get("controller")), ""))


def active_pods(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pods that are not on their way out, by name."""
    return sorted(
        (
            pod
            for pod in pods
            if not pod["metadata"].get("deletionTimestamp")
            and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")
        ),
        key=lambda pod: str(pod["metadata"]["name"]),
    )


def is_asleep(service: dict[str, Any] | None) -> bool:
    """Whether an InferenceService has no replicas because it sleeps. One that was scaled to 0 by hand is off,
    and requests do not wake it."""
    if service is None or (service.get("spec") or {}).get("replicas") != 0:
        return False
    return ASLEEP_ANNOTATION in (service["metadata"].get("annotations") or {})


def owned_by_autoscaler(item: dict[str, Any] | None, autoscaled: frozenset[Target] | None) -> bool:
    """Whether the `replicas` of this object, a Deployment, are an autoscaler's: one has set them, and is
    still there as far as is known. Until it has, they are ours: without us they would be 1."""
    if item is None or not was_autoscaled(item):
        return False
    metadata = item["metadata"]
    group = str(item.get("apiVersion", "")).rpartition("/")[0]
    target = Target(group, str(item.get("kind")), str(metadata["namespace"]), str(metadata["name"]))
    return autoscaled is None or target in autoscaled


def was_autoscaled(item: dict[str, Any] | None) -> bool:
    """Whether a HorizontalPodAutoscaler (KEDA's too) was the last to set the `replicas` of this object, a
    Deployment or an InferenceService: the controller manager wrote them through /scale. It says nothing of
    whether there still is one."""
    fields = ((item or {}).get("metadata") or {}).get("managedFields") or []
    return any(
        entry.get("subresource") == "scale"
        and entry.get("manager") == "kube-controller-manager"
        and "f:replicas" in (entry.get("fieldsV1") or {}).get("f:spec", {})
        for entry in fields
    )
