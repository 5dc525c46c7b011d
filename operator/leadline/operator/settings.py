"""Settings of the operator process, and what all InferenceServices share."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from leadline.protocol.isvc import OPERATOR_LABEL

__all__ = ["OperatorSettings"]


def _image(name: str) -> str:
    try:
        return f"{name}:{version('leadline')}"
    except PackageNotFoundError:
        return f"{name}:latest"


@dataclass(slots=True, frozen=True)
class OperatorSettings:
    namespaces: tuple[str, ...] = ()
    """Where to look for InferenceServices; empty: in all namespaces."""
    operator_name: str = ""
    """Look only at services whose label serving.leadline.io/operator is this; empty: at those without it. So
    two operators can share a namespace, as ingress classes let controllers do."""
    own_namespace: str = "leadline-system"
    """Where the operator runs: of its Lease, and of the NetworkPolicy rule that lets it ask pods."""
    engine_image: str = field(default_factory=lambda: _image("leadline/engine"))
    engine_cpu_image: str = field(default_factory=lambda: _image("leadline/engine-cpu"))
    accelerator: str = "gpu"
    """gpu | cpu, for services that do not say."""
    gpu_requests: dict[str, str] = field(default_factory=lambda: {"cpu": "1", "memory": "4Gi"})
    """What an engine asks for with each GPU, where its service does not say; empty: nothing."""
    cpu_requests: dict[str, str] = field(default_factory=lambda: {"cpu": "500m", "memory": "1536Mi"})
    """What an engine on the CPU asks for, beside the memory of its weights where their size is known."""
    gateway_url: str = ""
    """Base URL of the gateway, for status.url; empty: the service's own pods."""
    gateway_namespace: str = ""
    """Empty: own_namespace."""
    gateway_labels: dict[str, str] = field(
        default_factory=lambda: {
            "app.kubernetes.io/name": "leadline",
            "app.kubernetes.io/component": "gateway",
        }
    )
    """Pods that may talk to engine pods, besides the operator's."""
    monitoring_namespace: str = ""
    """Its pods may talk to engine pods too, for /metrics."""
    network_policies: bool = True
    name_prefixes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Namespace, or "*" for all others, → beginnings that the names of its services must have; `{namespace}`
    in one stands for the namespace. Namespaces that are not in here may claim any name."""
    redis_url: str = field(default="", repr=False)
    """Where engine pods publish, with one user for all of them if there is a user in it."""
    redis_admin_url: str = field(default="", repr=False)
    """The same Redis with an administrator's user and password: each service gets a user of its own there."""

    workers: int = 16
    """Reconciles at once."""
    resync_seconds: float = 300.0
    autoscale_seconds: float = 15.0
    """Between looks at the load of services with `autoscaling`."""
    leader_elect: bool = True
    lease_name: str = "leadline-operator"
    """The Lease goes with the Deployment of the same name, where there is one."""
    lease_seconds: float = 15.0
    port: int = 8080
    """Of /ready and /metrics; 0: no server."""
    liveness_port: int = 0
    """Of /health, which kopf serves; 0: no server."""

    def selects(self, service: dict[str, Any]) -> bool:
        """Whether an InferenceService is this operator's to look at."""
        labels = service["metadata"].get("labels") or {}
        return bool(labels.get(OPERATOR_LABEL, "") == self.operator_name)
