"""What InferenceServices say: which names lead to a service, and which Kubernetes Service has its pods.

Pure. Both stand in the status, which only the operator may write. Whoever may edit a namespace can put any
label, owner reference or pod into it, and none of these gives a name or leads requests for another service
there.
"""

import msgspec

from leadline.gateway.discovery.slices import Metadata
from leadline.protocol.isvc import GROUP, PLURAL, VERSION, ConditionType

__all__ = ["RESOURCE", "InferenceService"]

RESOURCE = (GROUP, VERSION, PLURAL)
"""API group, version and plural."""


class _Spec(msgspec.Struct, rename="camel"):
    served_name: str | None = None
    aliases: list[str] | None = None


class _Condition(msgspec.Struct):
    type: str = ""
    status: str = ""
    reason: str = ""


class _Status(msgspec.Struct, rename="camel"):
    names: list[str] | None = None
    service_uid: str = ""
    conditions: list[_Condition] | None = None


class InferenceService(msgspec.Struct):
    """The fields we read."""

    metadata: Metadata
    spec: _Spec | None = None
    status: _Status | None = None

    @property
    def key(self) -> str:
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def names(self) -> tuple[str, ...]:
        """Names that the operator has given it."""
        return tuple((self.status.names if self.status else None) or ())

    @property
    def service_uid(self) -> str:
        """Of the Service in front of its pods; empty until the operator has made it."""
        return self.status.service_uid if self.status else ""

    @property
    def reason(self) -> str:
        """Why it is not ready, in the operator's word; empty where it is, or where that is not known yet. The
        message beside it may name nodes and images, which are no concern of clients."""
        conditions = (self.status.conditions if self.status else None) or ()
        for condition in conditions:
            if condition.type == ConditionType.READY and condition.status != "True":
                return condition.reason
        return ""

    @property
    def undecided_names(self) -> tuple[str, ...]:
        """Names that it claims while the operator has not decided on any."""
        if self.status is not None and self.status.names is not None:
            return ()
        spec = self.spec or _Spec()
        return (spec.served_name or self.metadata.name, *(spec.aliases or ()), self.key)

    @property
    def age(self) -> tuple[str, str]:
        """The oldest is the lowest."""
        return self.metadata.creation_timestamp, self.metadata.uid
