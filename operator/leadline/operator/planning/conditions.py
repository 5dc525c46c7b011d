"""The status of an InferenceService: counts and conditions, as a function of what was observed.

Pure.

    Ready            all wanted pods run the newest template and are ready; the reason says why not
    ModelAvailable   at least one pod serves
    Progressing      a rollout, a start or a change of scale is under way and can still succeed
    NamesAccepted    every name that the service claims leads clients to it
    Autoscaling      with `autoscaling`: the operator scales the service; the message has its last decision
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from leadline.operator.names import PORT, selector_text
from leadline.operator.objects import ServiceContext
from leadline.operator.planning.diagnosis import (
    Finding,
    diagnose_pod,
    diagnose_refused,
    is_ready,
    last_eviction,
    template_of,
    worst,
)
from leadline.operator.planning.observed import Observed, active_pods, is_asleep, owner_of
from leadline.protocol.isvc import ConditionType, Reason

__all__ = [
    "Verdict",
    "add_names",
    "invalid_status",
    "judge",
    "make_status",
    "readiness_is_stale",
    "refused_names",
    "said_of",
]

_REPLICA_SET = re.compile(r'(?:new replica set|ReplicaSet) "([^"]+)"')
"""How the deployment controller names the newest ReplicaSet in the condition Progressing."""
_OF_ANY_GENERATION = (Reason.APPLY_REFUSED, Reason.SCALED_TO_ZERO, Reason.ASLEEP)
"""Reasons that come from the spec alone, not from pods."""
_WITHOUT_A_PLACE = (Reason.UNSCHEDULABLE, Reason.POD_SETUP_FAILED)
_ONE_NODE = (
    "; cache.accessMode is ReadWriteOnce, so all pods of the service need one node: for pods on several, "
    "name a ReadWriteMany claim in cache.claimName"
)


@dataclass(slots=True, frozen=True)
class Verdict:
    """What the conditions say, in one place."""

    ready: bool
    reason: Reason
    message: str
    available: bool
    progressing: bool


def judge(context: ServiceContext, observed: Observed, wanted: int) -> Verdict:
    """The verdict over a valid service that wants `wanted` pods."""
    pods = active_pods(observed.pods)
    ready = sum(map(is_ready, pods))
    deployment = observed.deployment or {}
    status = deployment.get("status", {})
    updated = int(status.get("updatedReplicas") or 0)
    total = int(status.get("replicas") or 0)
    old = max(total - updated, 0)

    if wanted == 0:
        scaling = context.spec.autoscaling
        if scaling is not None and is_asleep(observed.service):
            text = f"no request came for {scaling.idle_seconds} s; the next one starts a pod"
            return Verdict(False, Reason.ASLEEP, text, ready > 0, bool(pods))
        text = f"replicas is 0; {len(pods)} pods are to go" if pods else "replicas is 0"
        return Verdict(False, Reason.SCALED_TO_ZERO, text, ready > 0, bool(pods))
    if _is_seen(deployment) and old == 0 and updated >= wanted and ready >= wanted:
        # More than are wanted: a service that has shrunk, whose pods are about to go.
        text = f"{wanted} of {wanted} pods serve"
        if not observed.names.refused:
            return Verdict(True, Reason.READY, text, True, total > wanted)
        reason, message = refused_names(observed)
        # Without its served name the clients of the gateway do not reach it as its owner expects.
        ready_as_named = context.served_name not in observed.names.refused or not context.settings.gateway_url
        reason = Reason.READY if ready_as_named else reason
        return Verdict(ready_as_named, reason, f"{text}; {message}", True, total > wanted)

    resource = context.spec.accelerator.resource_name
    progress, pod_events = observed.progress, observed.pod_events
    newest = _of_newest_template(pods, deployment)
    findings = [
        finding
        for pod, uid in ((pod, str(pod["metadata"].get("uid"))) for pod in newest)
        if (finding := diagnose_pod(pod, resource, progress.get(uid), pod_events.get(uid, "")))
    ]
    finding = worst([*findings, *_refused(deployment)])
    if finding is None or finding.reason == Reason.CREATING_PODS:
        finding = diagnose_refused(observed.pods, resource) or finding
    shared = context.shares_cache_on_one_node and wanted > 1
    if shared and finding is not None and finding.reason in _WITHOUT_A_PLACE:
        finding = replace(finding, message=f"{finding.message}{_ONE_NODE}")
    if finding is not None and not finding.is_failure and (before := last_eviction(observed.pods)):
        finding = replace(finding, message=f"{finding.message}; {before}")
    available = ready > 0
    blocked = _blocked(finding, deployment, old, wanted)
    if blocked is not None:
        return Verdict(False, Reason.ROLLOUT_BLOCKED, blocked, available, False)
    if finding is not None and finding.is_failure:
        return Verdict(False, finding.reason, finding.message, available, finding.may_pass)
    if old > 0 and updated < wanted:
        text = f"{updated} of {wanted} pods run the newest template"
        if finding is not None:
            text += f"; {finding.message}"
        return Verdict(False, Reason.ROLLING_OUT, text, available, True)
    if finding is not None:
        return Verdict(False, finding.reason, finding.message, available, True)
    return Verdict(False, Reason.CREATING_PODS, f"{ready} of {wanted} pods serve", available, True)


def refused_names(observed: Observed) -> tuple[Reason, str]:
    """Reason and sentence for the names that the service claims and does not have, of which there is one."""
    refused, accepted = observed.names.refused, observed.names.accepted
    reason = next(iter(refused.values())).reason
    why = "; ".join(one.message for one in refused.values())
    reached = f"clients reach this service as {', '.join(map(repr, accepted))}" if accepted else ""
    advice = "set servedName or aliases to names that are free" if not accepted else reached
    return reason, f"{why}: {advice}"


def add_names(status: dict[str, Any], observed: Observed) -> None:
    """Put the decision on names into a status: gateways go by it."""
    if observed.names.accepted:
        status["names"] = list(observed.names.accepted)
    else:
        status.pop("names", None)
    service = next((child for (kind, _), child in observed.children.items() if kind == "Service"), None)
    if service is not None and owner_of(service) == observed.uid:
        status["serviceUid"] = str(service["metadata"]["uid"])
    else:
        status.pop("serviceUid", None)
    # With the rest of the status, or each change of a spec would be a write more.
    generation = int(status["observedGeneration"])
    reason, message = Reason.NAMES_ACCEPTED, ""
    if observed.names.refused:
        reason, message = refused_names(observed)
    kind = ConditionType.NAMES_ACCEPTED
    wanted = ((kind, not observed.names.refused, reason, message),)
    status["conditions"] = [
        *(one for one in status["conditions"] if one["type"] != kind),
        *_stamped(observed, wanted, generation),
    ]


def _is_seen(deployment: dict[str, Any]) -> bool:
    """Whether the Deployment's status is that of its present spec."""
    seen = deployment.get("status", {}).get("observedGeneration", 0)
    return bool(seen >= deployment.get("metadata", {}).get("generation", 1))


def _of_newest_template(pods: list[dict[str, Any]], deployment: dict[str, Any]) -> list[dict[str, Any]]:
    """Return those of `pods` that run the newest template. Older pods, which a rollout has yet to replace,
    may fail for a reason that has been corrected. Returns all pods if the Deployment names no template."""
    status = deployment.get("status", {})
    if _is_paused(deployment):
        return pods  # whatever they are made from: no others will be
    if status.get("replicas") and not status.get("updatedReplicas") and _is_seen(deployment):
        return []
    said = [one for one in status.get("conditions") or [] if one.get("type") == "Progressing"]
    match = _REPLICA_SET.search(str(said[0].get("message", ""))) if said else None
    if match is None or not _is_seen(deployment):
        return pods
    # A ReplicaSet is called after its Deployment and the hash of its template.
    newest = match[1].removeprefix(f"{deployment['metadata']['name']}-")
    return [pod for pod in pods if template_of(pod) in ("", newest)]


def _is_paused(deployment: dict[str, Any]) -> bool:
    """By `kubectl rollout pause`: until it is resumed, pods are made and removed, but not replaced."""
    return bool(deployment.get("spec", {}).get("paused"))


def _refused(deployment: dict[str, Any]) -> list[Finding]:
    """The ReplicaSet controller could not even create pods: quota, Pod Security, an admission webhook."""
    return [
        Finding(Reason.PODS_REFUSED, str(condition.get("message", "the pods were refused")))
        for condition in deployment.get("status", {}).get("conditions") or []
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True"
    ]


def _blocked(finding: Finding | None, deployment: dict[str, Any], old: int, wanted: int) -> str | None:
    """Why a rollout cannot go on while old pods still serve, or None."""
    if old == 0 or wanted == 0:
        return None
    if _is_paused(deployment):
        name = deployment["metadata"]["name"]
        why = f"; {finding.message}" if finding is not None else ""
        return (
            f"Deployment {name} is paused, its pods keep the template that they have: "
            f"`kubectl rollout resume deployment {name}`{why}"
        )
    if finding is not None and finding.reason in (Reason.INSUFFICIENT_GPU, Reason.UNSCHEDULABLE):
        return (
            f"a pod of the newest template finds no place while {old} old pods hold theirs "
            f"({finding.message}); "
            "free a place, or set rollout.maxSurge to 0 and rollout.maxUnavailable to 1 or more"
        )
    for condition in deployment.get("status", {}).get("conditions") or []:
        if condition.get("type") == "Progressing" and condition.get("reason") == "ProgressDeadlineExceeded":
            why = finding.message if finding is not None else str(condition.get("message", ""))
            return f"the rollout made no progress while {old} old pods go on serving: {why}"
    return None


def readiness_is_stale(observed: Observed, verdict: Verdict, wanted: int) -> bool:
    """Whether the Deployment controller has not observed our change yet, which takes up to a second, so that
    the previous Ready condition stands. All pods of the service are ready."""
    conditions = (observed.service.get("status") or {}).get("conditions") or []
    was_ready = any(
        one.get("type") == ConditionType.READY and one.get("status") == "True" for one in conditions
    )
    deployment, pods = observed.deployment, active_pods(observed.pods)
    ready = sum(map(is_ready, pods))
    return bool(
        was_ready
        and verdict.reason == Reason.CREATING_PODS
        and deployment is not None
        and not _is_seen(deployment)
        and ready
        and ready >= min(wanted, len(pods))
    )


def _generation(observed: Observed, verdict: Verdict) -> int:
    """The generation of the spec that the verdict is about: not the newest while the Deployment's controller
    has yet to take note of it, for the pods are then those of the one before."""
    newest = int(observed.service["metadata"].get("generation", 0))
    deployment = observed.deployment
    if verdict.reason in _OF_ANY_GENERATION or deployment is None or _is_seen(deployment):
        return newest
    return int((observed.service.get("status") or {}).get("observedGeneration") or newest)


def make_status(context: ServiceContext, observed: Observed, wanted: int, verdict: Verdict) -> dict[str, Any]:
    """The whole status object."""
    pods = active_pods(observed.pods)
    deployment = (observed.deployment or {}).get("status", {})
    generation = _generation(observed, verdict)
    return {
        "observedGeneration": generation,
        "replicas": len(pods),
        "readyReplicas": sum(map(is_ready, pods)),
        "updatedReplicas": int(deployment.get("updatedReplicas") or 0),
        "desiredReplicas": wanted,
        "selector": selector_text(context.name),
        "url": _url(context),
        "servedName": context.served_name,
        "conditions": _stamped(observed, _conclusions(verdict) + _autoscaling(context, observed), generation),
    }


def invalid_status(observed: Observed, reason: Reason, message: str) -> dict[str, Any]:
    """The status of a service that cannot be planned; the fields about its pods stay as they were."""
    generation = int(observed.service["metadata"].get("generation", 0))
    old = observed.service.get("status") or {}
    pods = active_pods(observed.pods)
    available = any(map(is_ready, pods))
    verdict = Verdict(False, reason, message, available, False)
    return {
        **{name: value for name, value in old.items() if name != "conditions"},
        "observedGeneration": generation,
        "replicas": len(pods),
        "readyReplicas": sum(map(is_ready, pods)),
        "conditions": _stamped(observed, _conclusions(verdict), generation),
    }


def _url(context: ServiceContext) -> str:
    gateway = context.settings.gateway_url.rstrip("/")
    if gateway:
        return f"{gateway}/v1"
    return f"http://{context.child}.{context.namespace}.svc:{PORT}/v1"


_Conclusion = tuple[ConditionType, bool, Reason, str]
"""Type of a condition, whether it holds, its reason and its message."""


def _conclusions(verdict: Verdict) -> tuple[_Conclusion, ...]:
    reason = verdict.reason
    available = Reason.READY if verdict.available else reason
    return (
        (ConditionType.READY, verdict.ready, reason, verdict.message),
        (
            ConditionType.MODEL_AVAILABLE,
            verdict.available,
            available,
            "at least one pod serves" if verdict.available else verdict.message,
        ),
        (ConditionType.PROGRESSING, verdict.progressing, reason, ""),
    )


def _autoscaling(context: ServiceContext, observed: Observed) -> tuple[_Conclusion, ...]:
    """Nothing without `autoscaling`. The last decision stays until there is another, over restarts too."""
    scaling, report = context.spec.autoscaling, observed.scaling
    if scaling is None:
        return ()
    said = said_of(observed.service, ConditionType.AUTOSCALING)
    was_active = said.get("status", "True") == "True"
    active = was_active if report is None else report.active
    message = report.message if report is not None else ""
    if not message and said and active == was_active:
        message = str(said.get("message", ""))
    if not message:
        message = (
            f"{scaling.min} to {scaling.max} replicas, {scaling.target_concurrency} requests in flight each"
        )
    reason = Reason.AUTOSCALING_ACTIVE if active else Reason.STEPPED_ASIDE
    return ((ConditionType.AUTOSCALING, active, reason, message),)


def said_of(service: dict[str, Any], kind: ConditionType) -> dict[str, Any]:
    """The condition of that type that the service has; empty: none."""
    conditions = (service.get("status") or {}).get("conditions") or []
    return next((one for one in conditions if one.get("type") == kind), {})


def _stamped(observed: Observed, wanted: Iterable[_Conclusion], generation: int) -> list[dict[str, Any]]:
    """Conditions as the API has them; `lastTransitionTime` moves only with the status."""
    before = {one.get("type"): one for one in (observed.service.get("status") or {}).get("conditions") or []}
    now = observed.now.strftime("%Y-%m-%dT%H:%M:%SZ")
    conditions = []
    for kind, holds, why, message in wanted:
        status = "True" if holds else "False"
        old = before.get(str(kind), {})
        same = old.get("status") == status
        conditions.append(
            {
                "type": str(kind),
                "status": status,
                "reason": str(why),
                "message": message,
                "lastTransitionTime": old["lastTransitionTime"] if same else now,
                "observedGeneration": generation,
            }
        )
    return conditions
