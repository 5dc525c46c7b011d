"""The fields of an InferenceService: the one source of the CRD's schema and of what the operator reads.

`leadline.operator.crd` turns these types into the OpenAPI schema of `manifests/crd.yaml`: a field's default,
limits and description are written here and nowhere else. What a single field's limits cannot say stands in
`RULES`, CEL expressions each with the sentence that `kubectl apply` prints. Python names are snake case, JSON
names camel case.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, field

__all__ = [
    "MODEL_FORMS",
    "Accelerator",
    "Autoscaling",
    "Cache",
    "Condition",
    "EngineOptions",
    "InferenceServiceSpec",
    "InferenceServiceStatus",
    "Rollout",
    "Rule",
    "SecretKey",
    "Toleration",
]

MODEL_FORMS = "hf://ORG/NAME[@REVISION], pvc://CLAIM/PATH, file:///PATH (inside the image) or smollm2"


class Rule(msgspec.Struct, frozen=True):
    """One CEL rule of a schema (x-kubernetes-validations)."""

    rule: str
    message: str
    optional_old_self: bool = False
    """`oldSelf` is an optional that is empty on creation, so the rule runs then too."""


def _rules(*pairs: tuple[str, str]) -> dict[str, Any]:
    """Rules of one field, for Meta(extra_json_schema=...)."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in pairs]}


_QUANTITY = _rules(("isQuantity(self)", "must be a Kubernetes quantity, such as 100Gi"))

Name = Annotated[str, Meta(min_length=1, max_length=256)]
ServedName = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=256,
        extra_json_schema=_rules(
            (r"!self.matches('[\\s,]')", "names for clients hold no space and no comma")
        ),
    ),
]
IntOrPercent = int | str


class _Object(msgspec.Struct, rename="camel", kw_only=True, omit_defaults=False):
    RULES: ClassVar[tuple[Rule, ...]] = ()


class SecretKey(_Object, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=253, description="Secret in the same namespace.")]
    key: Annotated[str, Meta(min_length=1, max_length=253, description="Key in it.")] = "token"


class Autoscaling(_Object, kw_only=True):
    RULES = (Rule("self.min <= self.max", "autoscaling.min must not be greater than autoscaling.max"),)

    min: Annotated[int, Meta(ge=1, le=1000, description="Fewest replicas.")] = 1
    max: Annotated[int, Meta(ge=1, le=1000, description="Most replicas.")]
    target_concurrency: Annotated[
        int, Meta(ge=1, le=100_000, description="Requests in flight that one pod should have.")
    ] = 32


class EngineOptions(_Object, kw_only=True):
    """Settings of `leadline serve`; what is left out is the engine's to decide."""

    RULES = (
        Rule(
            "!has(self.extraArgs) || self.extraArgs.all(a, !['--host', '--port', '--tensor-parallel', "
            "'--served-name', '--redis-url', '--service', '--pod-name', '--advertise-address', "
            "'--drain-timeout'].exists(o, a == o || a.startsWith(o + '=')))",
            "engine.extraArgs must not set what the operator sets: host, port, tensor-parallel, served-name, "
            "redis-url, service, pod-name, advertise-address, drain-timeout",
        ),
    )

    max_model_len: Annotated[int, Meta(ge=1, description="Tokens, prompt and output together.")] | None = None
    block_size: Annotated[Literal[16, 32, 64, 128, 256], Meta(description="Tokens a KV block.")] | None = None
    gpu_memory_utilization: (
        Annotated[float, Meta(gt=0, le=1, description="Share of GPU memory for weights and KV cache.")] | None
    ) = None
    dtype: (
        Annotated[
            Literal["auto", "float32", "float16", "bfloat16"],
            Meta(description="Type of weights and activations."),
        ]
        | None
    ) = None
    quantization: Annotated[
        Literal["none"],
        Meta(description="Only none so far: weights are run in the precision they are stored in."),
    ] = "none"
    max_concurrent_requests: Annotated[int, Meta(ge=1, description="Requests a pod runs at once.")] | None = (
        None
    )
    startup_seconds: Annotated[
        int,
        Meta(
            ge=10, le=86_400, description="Time a pod may take to load the model before it is started again."
        ),
    ] = 3600
    warmup_prompts: Annotated[
        list[
            Annotated[
                str,
                Meta(
                    min_length=1,
                    max_length=32_768,
                    extra_json_schema=_rules((r"!self.contains('\n')", "a warm-up prompt is one line")),
                ),
            ]
        ],
        Meta(
            max_length=32,
            description="Prompts in the prefix cache before a pod is ready, such as system prompts.",
        ),
    ] = []
    extra_args: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=4096)]],
        Meta(max_length=64, description="More arguments of `leadline serve`, such as --prefill-chunk=2048."),
    ] = []


class Toleration(_Object, kw_only=True):
    """As in core/v1."""

    key: Annotated[str, Meta(max_length=317)] | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: Annotated[str, Meta(max_length=63)] | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None


class Accelerator(_Object, kw_only=True):
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
            extra_json_schema=_rules(
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


class Cache(_Object, kw_only=True):
    """A claim for downloaded models that outlives pods."""

    RULES = (
        Rule(
            "!oldSelf.hasValue() || (has(self.storageClass) ? self.storageClass : '') == "
            "(has(oldSelf.value().storageClass) ? oldSelf.value().storageClass : '')",
            "cache.storageClass cannot change on an existing claim: remove cache, apply, then add it again",
            True,
        ),
        Rule(
            "!oldSelf.hasValue() || self.accessMode == oldSelf.value().accessMode",
            "cache.accessMode cannot change on an existing claim: remove cache, apply, then add it again",
            True,
        ),
        Rule(
            "!oldSelf.hasValue() || !isQuantity(self.size) || !isQuantity(oldSelf.value().size) || "
            "quantity(self.size).compareTo(quantity(oldSelf.value().size)) >= 0",
            "cache.size can only grow: a claim cannot shrink",
            True,
        ),
    )

    size: Annotated[str, Meta(max_length=32, description="Size of the claim.", extra_json_schema=_QUANTITY)]
    storage_class: (
        Annotated[
            str, Meta(max_length=253, description="Storage class; the cluster's default when left out.")
        ]
        | None
    ) = None
    access_mode: Annotated[
        Literal["ReadWriteOnce", "ReadWriteMany"],
        Meta(description="ReadWriteMany lets the pods of several nodes share it."),
    ] = "ReadWriteOnce"


class Rollout(_Object, kw_only=True):
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


class InferenceServiceSpec(_Object, kw_only=True):
    RULES = (
        Rule(
            "oldSelf.hasValue() || !has(self.autoscaling) || self.replicas == 1",
            "replicas and autoscaling exclude each other: leave replicas out, the autoscaler sets it",
            True,
        ),
        Rule(
            "!has(self.accelerator.type) || self.accelerator.type != 'cpu' || self.tensorParallel == 1",
            "tensorParallel must be 1 with accelerator.type cpu",
        ),
        Rule(
            "!has(self.aliases) || !has(self.servedName) || !(self.servedName in self.aliases)",
            "aliases must not repeat servedName",
        ),
    )

    model: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=1024,
            description=f"The model: {MODEL_FORMS}.",
            extra_json_schema=_rules(
                (
                    "self == 'smollm2' || "
                    r"self.matches('^hf://[A-Za-z0-9][\\w.-]*/[\\w.-]+(@[\\w./-]+)?$') || "
                    r"self.matches('^pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/[^\\s]*)?$') || "
                    r"self.matches('^file:///[^\\s]+$')",
                    f"model must be {MODEL_FORMS}",
                ),
                (
                    "!self.contains('/../') && !self.endsWith('/..')",
                    "model must not climb out of its folder with ..",
                ),
            ),
        ),
    ]
    served_name: ServedName | None = None
    """None: metadata.name."""
    aliases: Annotated[
        list[ServedName],
        Meta(
            max_length=16,
            description="More names clients may use.",
            extra_json_schema={"x-kubernetes-list-type": "set"},
        ),
    ] = []
    tensor_parallel: Annotated[
        int, Meta(ge=1, le=16, description="Accelerators each pod spreads the model over.")
    ] = 1
    replicas: Annotated[
        int, Meta(ge=0, le=1000, description="Pods; set by kubectl scale and autoscalers too.")
    ] = 1
    autoscaling: Autoscaling | None = None
    engine: EngineOptions = field(default_factory=EngineOptions)
    accelerator: Accelerator = field(default_factory=Accelerator)
    cache: Cache | None = None
    token_secret_ref: SecretKey | None = None
    """The hub's token for hf:// models."""
    rollout: Rollout = field(default_factory=Rollout)
    pod_template: Annotated[
        dict[str, Any] | None,
        Meta(
            description="Strategic merge patch over the pod template that the operator makes; the last word."
        ),
    ] = None
    image: Annotated[
        str, Meta(min_length=1, max_length=1024, description="Engine image; the operator's default.")
    ] | (None) = None
    priority_class_name: (
        Annotated[str, Meta(max_length=253, description="PriorityClass of the pods.")] | None
    ) = None


class Condition(_Object, kw_only=True):
    """As in meta/v1."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""
    last_transition_time: str
    """RFC 3339; moves only when `status` does."""
    observed_generation: int | None = None


class InferenceServiceStatus(_Object, kw_only=True):
    observed_generation: int = 0
    replicas: Annotated[int, Meta(description="Pods there are.")] = 0
    ready_replicas: int = 0
    updated_replicas: Annotated[int, Meta(description="Pods of the newest template.")] = 0
    desired_replicas: int = 0
    selector: Annotated[str, Meta(description="Label selector of the pods, for /scale.")] = ""
    url: str = ""
    served_name: str = ""
    conditions: Annotated[
        list[Condition],
        Meta(extra_json_schema={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ] = []
