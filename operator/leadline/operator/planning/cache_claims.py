"""The claim that `cache.size` made, after the spec has changed: it is kept with its models, or in the way.

Pure. Weights take hours to download, so the claim is deleted only with its service, or where the spec had
`cache.retain: false` together with `cache`.
"""

from __future__ import annotations

from typing import Any

from leadline.operator.names import RETAIN_ANNOTATION, child_name
from leadline.operator.quantities import quantity
from leadline.protocol.isvc import FIELD_MANAGER
from leadline.protocol.isvc_types import InferenceServiceSpec

__all__ = ["claim_class", "claim_conflict", "goes", "is_retained", "words_of_retained"]

Object = dict[str, Any]


def goes(claim: Object, spec: InferenceServiceSpec, service: str) -> bool:
    """Whether a claim of the service, which is not among the wanted objects, may be deleted."""
    annotations = claim["metadata"].get("annotations") or {}
    return annotations.get(RETAIN_ANNOTATION) == "false" and not _names(spec, child_name(service))


def is_retained(claim: Object, spec: InferenceServiceSpec, service: str) -> bool:
    """Whether the claim is kept although nothing in the spec uses it."""
    if claim["metadata"].get("deletionTimestamp") or _names(spec, child_name(service)):
        return False
    made = spec.cache is not None and spec.cache.claim_name is None
    return not made and not goes(claim, spec, service)


def words_of_retained(claim: Object) -> str:
    """For the status and an Event."""
    name = claim["metadata"]["name"]
    return (
        f"claim {name} ({_size(claim)}), which cache no longer uses, is kept with its models: "
        f"cache.claimName {name} uses it again, `kubectl delete pvc {name}` frees it"
    )


def claim_conflict(claim: Object | None, spec: InferenceServiceSpec) -> str:
    """Why `cache.size` cannot be served by the claim there is, of an earlier `cache` perhaps, in a sentence;
    empty: it can."""
    cache = spec.cache
    if claim is None or cache is None or cache.claim_name is not None:
        return ""
    if claim["metadata"].get("deletionTimestamp"):
        return ""
    has = claim.get("spec") or {}
    modes, storage_class = has.get("accessModes") or [], has.get("storageClassName")
    differs = [
        name
        for name, other in (
            ("accessMode", cache.access_mode not in modes),
            ("storageClass", cache.storage_class is not None and cache.storage_class != storage_class),
            ("size", _is_less(str(cache.size), _size(claim))),
        )
        if other
    ]
    if not differs:
        return ""
    fields = " and ".join(f"cache.{name}" for name in differs)
    return (
        f"{fields} cannot be had: the service's claim {claim['metadata']['name']} is there with its models, "
        f"{_size(claim)}, {', '.join(modes)}, storage class {storage_class or '(none)'}, and a claim can "
        "only grow. Ask for what it has, or name another claim in cache.claimName"
    )


def claim_class(claim: Object | None) -> str | None:
    """The storage class that the service gave the claim, which an apply may not take back; None: the cluster
    chose it."""
    for entry in ((claim or {}).get("metadata") or {}).get("managedFields") or []:
        fields = (entry.get("fieldsV1") or {}).get("f:spec") or {}
        if entry.get("manager") == FIELD_MANAGER and "f:storageClassName" in fields:
            found: str | None = (claim or {})["spec"].get("storageClassName")
            return found
    return None


def _names(spec: InferenceServiceSpec, claim: str) -> bool:
    """Whether the spec uses a claim by its name."""
    of_model = spec.model.removeprefix("pvc://").partition("/")[0] if spec.model.startswith("pvc://") else ""
    return claim in (of_model, spec.cache.claim_name if spec.cache is not None else None)


def _size(claim: Object) -> str:
    requests = ((claim.get("spec") or {}).get("resources") or {}).get("requests") or {}
    return str(requests.get("storage", "0"))


def _is_less(one: str, other: str) -> bool:
    try:
        return quantity(one) < quantity(other)
    except ValueError:
        return False  # the API server's to refuse
