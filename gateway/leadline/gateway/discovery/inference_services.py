"""Reads InferenceServices: the names of a service, and the Kubernetes Service that has its pods.

Pure. Both are in the status, which only the operator may write. A user who may edit a namespace can create
any label, owner reference or pod in it, and none of these gives a name or leads another service's requests
there.
"""

import msgspec

from leadline.gateway.discovery.slices import Metadata
from leadline.protocol.isvc import GROUP, PLURAL, VERSION, ConditionType, Reason

__all__ = ["RESOURCE", "InferenceService"]

RESOURCE = (GROUP, VERSION, PLURAL)
"""API group, version and plural."""
_WAKE_SECONDS = 300.0
"""The CRD's default, for objects that are older than the field."""


class _Autoscaling(msgspec.Struct, rename="camel"):
    min: int | None = None
    wake_seconds: float | None = None


class _Spec(msgspec.Struct, rename="camel"):
    served_name: str | None = None
    aliases: list[str] | None = None
    autoscaling: _Autoscaling | None = None


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
        ready = self._condition(ConditionType.READY)
        return ready.reason if ready is not None and ready.status != "True" else ""

    @property
    def wake_seconds(self) -> float:
        """How long a request may wait for its first pod; 0 for a service that does not sleep, or is off."""
        autoscaling = (self.spec or _Spec()).autoscaling
        if autoscaling is None or autoscaling.min != 0 or self.reason == Reason.SCALED_TO_ZERO:
            return 0.0
        return autoscaling.wake_seconds or _WAKE_SECONDS

    @property
    def is_stuck(self) -> bool:
        """Whether no pod can come as things are: it is not ready, and no progress is to be expected."""
        progressing = self._condition(ConditionType.PROGRESSING)
        waits = self.reason in ("", Reason.ASLEEP, Reason.SCALED_TO_ZERO)
        return not waits and progressing is not None and progressing.status == "False"

    def _condition(self, kind: ConditionType) -> _Condition | None:
        conditions = (self.status.conditions if self.status else None) or ()
        return next((one for one in conditions if one.type == kind), None)

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
