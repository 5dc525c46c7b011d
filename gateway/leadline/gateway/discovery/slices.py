"""Reads the pods of a service from EndpointSlices.

Pure. Source: the Kubernetes API, discovery.k8s.io/v1:
- conditions: `ready` absent means ready; `serving` is `ready` that ignores termination; `terminating` absent
  means no. A pod is `terminating` from its deletionTimestamp on, and is sent nothing new from then (P8), also
  where publishNotReadyAddresses keeps it "ready".
- one service has several slices (100 endpoints each by default), and a pod may stand in two of them while it
  is moved, or because the service is dual-stack; readers must find duplicates themselves. We do, by the uid
  of the pod. Of contradicting entries the careful one counts.
"""

from collections.abc import Iterable

import msgspec

from leadline.gateway.discovery.pod_set import FoundPod
from leadline.protocol.isvc import label

__all__ = ["OUR_LABEL", "RESOURCE", "SERVICE_LABEL", "EndpointSlice", "Metadata", "found_pods"]

RESOURCE = ("discovery.k8s.io", "v1", "endpointslices")
"""API group, version and plural."""

SERVICE_LABEL = "kubernetes.io/service-name"
"""On every slice: the Service it belongs to."""
OUR_LABEL = label("service")
"""On Services of ours, and copied from them to their slices: the InferenceService."""


_FAMILIES = {"IPv4": 0, "IPv6": 1, "FQDN": 2}
"""Which address of a dual-stack pod is used: the first."""


class _Owner(msgspec.Struct):
    uid: str = ""
    controller: bool | None = None


class Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str = ""
    labels: dict[str, str] | None = None
    owner_references: list[_Owner] | None = None


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _Reference(msgspec.Struct):
    kind: str = ""
    name: str = ""
    uid: str = ""


class _Endpoint(msgspec.Struct, rename="camel"):
    addresses: list[str] | None = None
    conditions: _Conditions | None = None
    target_ref: _Reference | None = None


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class EndpointSlice(msgspec.Struct, rename="camel"):
    """The fields we read. The API server leaves out, or sets to null, what is empty."""

    metadata: Metadata
    address_type: str = "IPv4"
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None

    @property
    def key(self) -> str:
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def service_uid(self) -> str:
        """The uid of the Service that it belongs to; empty for a slice made by hand."""
        owners = self.metadata.owner_references or ()
        return next((one.uid for one in owners if one.controller), "")

    def label(self, name: str) -> str:
        return (self.metadata.labels or {}).get(name, "")


def found_pods(slices: Iterable[EndpointSlice], port: str) -> list[FoundPod]:
    """The pods of a service's slices, each once, sorted by id.

    `port`: name or number of the port to use; where no port has it, the first.
    """
    found: dict[str, FoundPod] = {}
    for piece in sorted(slices, key=lambda one: (_FAMILIES.get(one.address_type, 3), one.key)):
        number = _port(piece.ports or [], port)
        if number is None:
            continue
        for endpoint in piece.endpoints or []:
            if not endpoint.addresses:
                continue
            host = endpoint.addresses[0]
            address = f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
            reference = endpoint.target_ref or _Reference()
            conditions = endpoint.conditions or _Conditions()
            ready = conditions.ready is not False
            terminating = conditions.terminating is True
            identity = reference.uid or reference.name or address
            before = found.get(identity)
            if before is not None:
                address = before.address
                ready = ready and before.ready
                terminating = terminating or before.terminating
            found[identity] = FoundPod(reference.name or address, address, reference.uid, ready, terminating)
    by_name: dict[str, FoundPod] = {}
    for pod in found.values():
        # A StatefulSet's pod and its successor share a name for a moment: the one that stays counts.
        other = by_name.get(pod.id)
        if other is None or (other.terminating and not pod.terminating):
            by_name[pod.id] = pod
    return sorted(by_name.values(), key=lambda pod: pod.id)


def _port(ports: list[_Port], wanted: str) -> int | None:
    usable = [one for one in ports if one.port and one.protocol in (None, "TCP")]
    for one in usable:
        if one.name == wanted or str(one.port) == wanted:
            return one.port
    return usable[0].port if usable else None
