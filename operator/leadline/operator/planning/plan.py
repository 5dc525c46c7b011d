"""`plan`: from one InferenceService and what was observed of it, what should exist and what to say.

Pure: no clock, no network, no randomness. Everything the operator decides is decided here;
`reconcile` only carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from leadline.operator.names import HASH_ANNOTATION, MANAGED_BY
from leadline.operator.objects import ServiceContext, network_objects, support_objects, workload_objects
from leadline.operator.objects.context import digest
from leadline.operator.objects.pod import mistyped_container
from leadline.operator.objects.strategic import misshapen
from leadline.operator.planning.cache_claims import (
    claim_class,
    claim_conflict,
    goes,
    is_retained,
    words_of_retained,
)
from leadline.operator.planning.conditions import (
    Verdict,
    add_names,
    invalid_status,
    judge,
    make_status,
    readiness_is_stale,
    refused_names,
    said_of,
)
from leadline.operator.planning.observed import Observed, owned_by_autoscaler, owner_of
from leadline.operator.settings import OperatorSettings
from leadline.protocol.isvc import ConditionType, Reason
from leadline.protocol.isvc_types import InferenceServiceSpec

__all__ = ["Event", "Plan", "plan"]

Object = dict[str, Any]

_NORMAL = {
    Reason.READY,
    Reason.SCALED_TO_ZERO,
    Reason.ASLEEP,
    Reason.CREATING_PODS,
    Reason.DOWNLOADING,
    Reason.LOADING_WEIGHTS,
    Reason.ROLLING_OUT,
}


@dataclass(slots=True, frozen=True)
class Event:
    """One Kubernetes Event on the service."""

    warning: bool
    reason: str
    message: str


@dataclass(slots=True)
class Plan:
    desired: list[Object] | None = None
    """In the order of application; None: leave the existing objects alone, since the spec cannot be read."""
    delete: list[Object] = field(default_factory=list)
    """Children of ours that are no longer wanted."""
    replicas: int | None = None
    """The number to write into an absent `spec.replicas`; without it, `/scale` cannot be read."""
    status: Object = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)


def plan(observed: Observed, settings: OperatorSettings) -> Plan:
    """Decide everything for one service."""
    service = observed.service
    metadata = service["metadata"]
    try:
        spec = msgspec.convert(service.get("spec", {}), InferenceServiceSpec)
    except msgspec.ValidationError as error:
        # The CRD refuses what cannot be read, except for objects that are older than the CRD's rules.
        return _stuck(observed, Reason.INVALID_SPEC, f"the spec cannot be read: {error}")
    if wrong := misshapen(spec.pod_template or {}, "podTemplate"):
        return _stuck(observed, Reason.INVALID_SPEC, wrong)
    deployment, claim = observed.deployment, observed.claim
    context = ServiceContext(
        metadata["name"],
        metadata["namespace"],
        observed.uid,
        spec,
        settings,
        replicas_owned_elsewhere=owned_by_autoscaler(deployment, observed.autoscaled),
        running=None if deployment is None else deployment.get("spec", {}).get("replicas"),
        limited=observed.limited,
        claim_class=claim_class(claim),
    )
    if not context.on_gpu and spec.tensor_parallel > 1:
        return _stuck(
            observed,
            Reason.INVALID_SPEC,
            "tensorParallel needs accelerators, and this operator's default is the CPU: set accelerator.type "
            "to gpu",
        )
    if wrong := mistyped_container(context) or claim_conflict(claim, spec):
        return _stuck(observed, Reason.INVALID_SPEC, wrong)
    objects = [*support_objects(context), *network_objects(context), *workload_objects(context)]
    taken = [one for one in objects if _is_foreign(observed, one)]
    if taken:
        names = ", ".join(f"{one['kind']} {one['metadata']['name']}" for one in taken)
        return _stuck(
            observed,
            Reason.NAME_TAKEN,
            f"{names}: exists already and belongs to somebody else; delete it or rename the service",
        )
    for one in objects:
        if one["kind"] == "Secret":
            continue  # a digest of a password invites guessing; the Deployment's redis-hash stands for it
        one["metadata"]["annotations"] = {
            **one["metadata"].get("annotations", {}),
            HASH_ANNOTATION: digest(one),
        }
    wanted = context.replicas
    if context.replicas_owned_elsewhere and deployment is not None:
        wanted = int(deployment.get("spec", {}).get("replicas", wanted))
    verdict = judge(context, observed, wanted)
    if observed.refusal:
        verdict = Verdict(False, Reason.APPLY_REFUSED, observed.refusal, verdict.available, False)
    retained = claim if claim is not None and is_retained(claim, spec, metadata["name"]) else None
    if retained is not None:
        verdict = replace(verdict, message=f"{verdict.message}; {words_of_retained(retained)}")
    status = make_status(context, observed, wanted, verdict)
    events = _events(observed, verdict.reason, verdict.message) + _scaling_events(observed, status)
    if readiness_is_stale(observed, verdict, wanted):
        # The conditions of the previous generation stay, as such.
        said = observed.service["status"]
        status |= {name: said[name] for name in ("observedGeneration", "conditions") if name in said}
        events = []
    add_names(status, observed)
    events += _name_events(observed)
    if retained is not None:
        status["retainedClaim"] = retained["metadata"]["name"]
        if "retainedClaim" not in (service.get("status") or {}):
            events.append(Event(False, "CacheRetained", words_of_retained(retained)))
    return Plan(
        desired=objects,
        delete=_unwanted(observed, objects, spec),
        replicas=wanted if spec.replicas is None else None,
        status=status,
        events=events,
    )


def _stuck(observed: Observed, reason: Reason, message: str) -> Plan:
    status = invalid_status(observed, reason, message)
    add_names(status, observed)
    return Plan(status=status, events=[*_events(observed, reason, message), *_name_events(observed)])


def _name_events(observed: Observed) -> list[Event]:
    """A Warning when other names than before are refused."""
    if not observed.names.refused:
        return []
    reason, message = refused_names(observed)
    if said_of(observed.service, ConditionType.NAMES_ACCEPTED).get("message") == message:
        return []
    return [Event(True, str(reason), message)]


def _events(observed: Observed, reason: Reason, message: str) -> list[Event]:
    """One when the reason of Ready changes, none while it stays."""
    if said_of(observed.service, ConditionType.READY).get("reason") == str(reason):
        return []
    return [Event(reason not in _NORMAL, str(reason), message)]


def _scaling_events(observed: Observed, status: Object) -> list[Event]:
    """One for each decision of the autoscaler, and when it steps aside or resumes."""
    said = said_of(observed.service, ConditionType.AUTOSCALING)
    says = said_of({"status": status}, ConditionType.AUTOSCALING)
    decided = bool(observed.scaling is not None and observed.scaling.message)
    if not says or says.get("message") == said.get("message") or not (said or decided):
        return []
    return [Event(False, str(says["reason"]), str(says["message"]))]


def _is_foreign(observed: Observed, wanted: Object) -> bool:
    """Whether an object of that kind and name exists that is not ours. One of a deleted service of the same
    name (it is being collected) counts as ours in the making: applying fails until it is gone, and is tried
    again."""
    child = observed.children.get((wanted["kind"], wanted["metadata"]["name"]))
    if child is None or owner_of(child) == observed.uid:
        return False
    labels = child["metadata"].get("labels") or {}
    return bool(labels.get("app.kubernetes.io/managed-by") != MANAGED_BY)


def _unwanted(observed: Observed, objects: list[Object], spec: InferenceServiceSpec) -> list[Object]:
    service = observed.service["metadata"]["name"]
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    return [
        child
        for key, child in sorted(observed.children.items())
        if key not in names
        and owner_of(child) == observed.uid
        and not child["metadata"].get("deletionTimestamp")
        and (child["kind"] != "PersistentVolumeClaim" or goes(child, spec, service))
    ]
