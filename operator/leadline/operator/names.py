"""Names and labels of what belongs to one InferenceService.

Names are functions of the service's name alone, so that every pass of every replica means the same objects
(P4). Labels hold the service's name, which the CRD limits to 52 characters of a-z, 0-9 and -; the names of
models, which may be anything (P17), stand in arguments, environment variables and the status.
"""

from __future__ import annotations

from leadline.protocol.isvc import label

__all__ = [
    "COMPONENT_LABEL",
    "CONTAINER",
    "DOWNLOAD_CONTAINER",
    "HASH_ANNOTATION",
    "MANAGED_BY",
    "MANAGED_SELECTOR",
    "PORT",
    "PORT_NAME",
    "RETAIN_ANNOTATION",
    "SERVICE_LABEL",
    "child_labels",
    "child_name",
    "redis_secret_name",
    "selector_labels",
    "selector_text",
]

SERVICE_LABEL = label("service")
COMPONENT_LABEL = "app.kubernetes.io/component"
MANAGED_BY = "leadline-operator"
MANAGED_SELECTOR = f"app.kubernetes.io/managed-by={MANAGED_BY}"
"""Label selector of everything the operator watches."""
HASH_ANNOTATION = label("applied-hash")
"""On every object of ours: digest of what was applied."""
RETAIN_ANNOTATION = label("retain")
"""On a cache claim: "false" lets the operator delete it when the spec no longer asks for it."""
CONTAINER = "engine"
DOWNLOAD_CONTAINER = "download"
"""Init container that fetches an hf:// model into the cache."""
PORT = 8000
PORT_NAME = "http"


def child_name(service: str) -> str:
    """Name of the Deployment, Service, PodDisruptionBudget, …: one of each kind."""
    return f"{service}-engine"


def redis_secret_name(service: str) -> str:
    return f"{service}-redis"


def selector_labels(service: str) -> dict[str, str]:
    """What selects the pods. A Deployment's selector never changes, so neither may these."""
    return {SERVICE_LABEL: service, COMPONENT_LABEL: "engine"}


def selector_text(service: str) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(selector_labels(service).items()))


def child_labels(service: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "leadline",
        "app.kubernetes.io/instance": service,
        "app.kubernetes.io/managed-by": MANAGED_BY,
        "app.kubernetes.io/part-of": "leadline",
        **selector_labels(service),
    }
