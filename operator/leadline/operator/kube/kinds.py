"""The kinds of objects that the operator reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

from leadline.protocol.isvc import API_VERSION, KIND, PLURAL

__all__ = ["BY_KIND", "CHILDREN", "EVENT", "POD", "SERVICE", "Kind"]


@dataclass(slots=True, frozen=True)
class Kind:
    kind: str
    api_version: str
    plural: str

    @property
    def group(self) -> str:
        group, slash, _ = self.api_version.rpartition("/")
        return group if slash else ""

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]


SERVICE = Kind(KIND, API_VERSION, PLURAL)
POD = Kind("Pod", "v1", "pods")
EVENT = Kind("Event", "v1", "events")
CHILDREN = (
    Kind("ServiceAccount", "v1", "serviceaccounts"),
    Kind("ConfigMap", "v1", "configmaps"),
    Kind("PersistentVolumeClaim", "v1", "persistentvolumeclaims"),
    Kind("Service", "v1", "services"),
    Kind("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies"),
    Kind("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets"),
    Kind("Deployment", "apps/v1", "deployments"),
)
"""Watched. Secrets are written, never read: the operator needs no right to read anybody's."""
BY_KIND = {one.kind: one for one in (*CHILDREN, POD, SERVICE, Kind("Secret", "v1", "secrets"))}
