"""Parts of an InferenceService's spec that stand on their own, and what all of its types are made with.

The fields of the whole are in isvc_types.py, whose docstring says what becomes of them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

__all__ = [
    "Accelerator",
    "Autoscaling",
    "Cache",
    "Rollout",
    "Rule",
    "SecretKey",
    "SpecObject",
    "Toleration",
    "rules_of",
]

IntOrPercent = int | str


class Rule(msgspec.Struct, frozen=True):
    """One CEL rule of a schema (x-kubernetes-validations)."""

    rule: str
    message: str
    optional_old_self: bool = False
    """`oldSelf` is an optional that is empty on creation, so the rule runs then too."""


def rules_of(*pairs: tuple[str, str]) -> dict[str, Any]:
    """Rules of one field, for Meta(extra_json_schema=...)."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in pairs]}


_QUANTITY = rules_of(("isQuantity(self)", "must be a Kubernetes quantity, such as 100Gi"))


class SpecObject(msgspec.Struct, rename="camel", kw_only=True, omit_defaults=False):
    """Python names are snake case, JSON names camel case."""

    RULES: ClassVar[tuple[Rule, ...]] = ()


class SecretKey(SpecObject, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=253, description="Secret in the same namespace.")]
    key: Annotated[str, Meta(min_length=1, max_length=253, description="Key in it.")] = "token"


class Autoscaling(SpecObject, kw_only=True):
    RULES = (Rule("self.min <= self.max", "autoscaling.min must not be greater than autoscaling.max"),)

    min: Annotated[
        int, Meta(ge=0, le=1000, description="Fewest replicas. 0: it sleeps without requests.")
    ] = 1
    max: Annotated[int, Meta(ge=1, le=1000, description="Most replicas.")]
    target_concurrency: Annotated[
        int, Meta(ge=1, le=100_000, description="Requests in flight that one pod should have.")
    ] = 32
    idle_seconds: Annotated[
        int, Meta(ge=10, le=604_800, description="With min 0: time without a request before the pods go.")
    ] = 300
    wake_seconds: Annotated[
        int, Meta(ge=1, le=3600, description="With min 0: how long the gateway holds a request for a pod.")
    ] = 300


class Toleration(SpecObject, kw_only=True):
    """As in core/v1."""

    key: Annotated[str, Meta(max_length=317)] | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: Annotated[str, Meta(max_length=63)] | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None


class Accelerator(SpecObject, kw_only=True):
    type: (
        Annotated[
            Literal["gpu", "cpu"],
            Meta(description="What the model runs on; the operator's default when left out."),
        ]
        | None
    ) = None
    resource_name: Annotated[
        str,
        Meta(
            max_length=253,
            description="Extended resource of which each pod asks for tensorParallel.",
            extra_json_schema=rules_of(
                ("self.contains('/')", "must be an extended resource with a domain, such as nvidia.com/gpu")
            ),
        ),
    ] = "nvidia.com/gpu"
    runtime_class_name: (
        Annotated[str, Meta(max_length=253, description="RuntimeClass of the pods.")] | None
    ) = None
    node_selector: Annotated[
        dict[str, Annotated[str, Meta(max_length=63)]],
        Meta(max_length=64, description="Labels a node must have."),
    ] = {}
    tolerations: Annotated[
        list[Toleration], Meta(max_length=64, description="Taints the pods tolerate.")
    ] = []


class Cache(SpecObject, kw_only=True):
    """A claim for downloaded models that outlives pods: one made for the service, or one that exists."""

    RULES = (
        Rule(
            "has(self.claimName) != has(self.size)",
            "cache takes either claimName, a claim that exists, or size, for one that is made",
        ),
        Rule(
            "!has(self.claimName) || !has(self.storageClass)",
            "cache.storageClass is of a claim that is made, and claimName names one that exists",
        ),
        Rule(
            "!oldSelf.hasValue() || !has(self.size) || !has(oldSelf.value().size) || "
            "(has(self.storageClass) ? self.storageClass : '') == "
            "(has(oldSelf.value().storageClass) ? oldSelf.value().storageClass : '')",
            "cache.storageClass cannot change on an existing claim, which is kept with its models: "
            "name a claim of your own in cache.claimName",
            True,
        ),
        Rule(
            "!oldSelf.hasValue() || !has(self.size) || !has(oldSelf.value().size) || "
            "self.accessMode == oldSelf.value().accessMode",
            "cache.accessMode cannot change on an existing claim, which is kept with its models: "
            "name a claim of your own in cache.claimName",
            True,
        ),
        Rule(
            "!oldSelf.hasValue() || !has(self.size) || !has(oldSelf.value().size) || "
            "!isQuantity(self.size) || !isQuantity(oldSelf.value().size) || "
            "quantity(self.size).compareTo(quantity(oldSelf.value().size)) >= 0",
            "cache.size can only grow: a claim cannot shrink",
            True,
        ),
    )

    claim_name: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=253,
                description="A claim that exists in the namespace, which services may share.",
            ),
        ]
        | None
    ) = None
    size: (
        Annotated[str, Meta(max_length=32, description="Size of the claim.", extra_json_schema=_QUANTITY)]
        | None
    ) = None
    storage_class: (
        Annotated[
            str, Meta(max_length=253, description="Storage class; the cluster's default when left out.")
        ]
        | None
    ) = None
    access_mode: Annotated[
        Literal["ReadWriteOnce", "ReadWriteMany"],
        Meta(
            description="Of the claim that is made: ReadWriteMany lets the pods of several nodes share it; "
            "with ReadWriteOnce pods prefer one node."
        ),
    ] = "ReadWriteOnce"
    retain: Annotated[
        bool,
        Meta(
            description="Keep the claim that is made, with its models, when cache is removed or names "
            "another; with the service it goes in any case."
        ),
    ] = True


class Rollout(SpecObject, kw_only=True):
    RULES = (
        Rule(
            "!(string(self.maxSurge) in ['0', '0%'] && string(self.maxUnavailable) in ['0', '0%'])",
            "rollout.maxSurge and rollout.maxUnavailable must not both be 0: no pod could ever be replaced",
        ),
    )

    max_surge: Annotated[
        IntOrPercent,
        Meta(description="Pods above the wanted number during a rollout; each needs a free GPU."),
    ] = 0
    max_unavailable: Annotated[
        IntOrPercent, Meta(description="Pods below the wanted number during a rollout.")
    ] = 1
    drain_seconds: Annotated[
        int, Meta(ge=0, le=86_400, description="Time that running requests of a leaving pod get to finish.")
    ] = 60
