"""The fields of an InferenceService: the one source of the CRD's schema and of what the operator reads.

`leadline.operator.crd` turns these types into the OpenAPI schema of `manifests/crd.yaml`: a field's default,
limits and description are written here and nowhere else. What a single field's limits cannot say stands in
`RULES`, CEL expressions each with the sentence that `kubectl apply` prints. Python names are snake case, JSON
names camel case.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from leadline.protocol.isvc_parts import (
    Accelerator,
    Autoscaling,
    Cache,
    Rollout,
    Rule,
    SecretKey,
    SpecObject,
    Toleration,
    rules_of,
)

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


ServedName = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=256,
        extra_json_schema=rules_of(
            (r"!self.matches('[\\s,]')", "names for clients hold no space and no comma")
        ),
    ),
]


class EngineOptions(SpecObject, kw_only=True):
    """Settings of `leadline serve`; the engine decides about those left out."""

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
    block_size: Annotated[Literal[16, 32, 64, 128, 256], Meta(description="Tokens in a KV block.")] | None = (
        None
    )
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
        Literal["none", "fp8"],
        Meta(description="none: weights keep their stored precision; fp8: weights in 8 bits."),
    ] = "none"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        Meta(
            description="auto: the KV cache has the model's type; fp8: twice the tokens in the same memory."
        ),
    ] = "auto"
    max_concurrent_requests: Annotated[int, Meta(ge=1, description="Concurrent requests per pod.")] | None = (
        None
    )
    startup_seconds: Annotated[
        int,
        Meta(
            ge=10,
            le=86_400,
            description="Longest time to load the model; then the container restarts.",
        ),
    ] = 3600
    warmup_prompts: Annotated[
        list[
            Annotated[
                str,
                Meta(
                    min_length=1,
                    max_length=32_768,
                    extra_json_schema=rules_of((r"!self.contains('\n')", "a warm-up prompt is one line")),
                ),
            ]
        ],
        Meta(
            max_length=32,
            description="Prompts in the prefix cache before a pod is ready, such as system prompts.",
        ),
    ] = field(default_factory=list)
    extra_args: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=4096)]],
        Meta(max_length=64, description="Further arguments of `leadline serve`: --prefill-chunk=2048."),
    ] = field(default_factory=list)


class InferenceServiceSpec(SpecObject, kw_only=True):
    RULES = (
        Rule(
            "oldSelf.hasValue() || !has(self.autoscaling) || !has(self.replicas) || self.replicas == 1",
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
        Rule(
            "!(self.task in ['embed', 'rerank']) || self.tensorParallel == 1",
            "tensorParallel must be 1 with task embed or rerank",
        ),
    )

    model: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=1024,
            description=f"The model: {MODEL_FORMS}.",
            extra_json_schema=rules_of(
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
    task: Annotated[
        Literal["auto", "generate", "embed", "rerank"],
        Meta(
            description="generate: text; embed: vectors; rerank: scores of pairs of texts; auto: what the "
            "model's files say, which is generate for most decoders."
        ),
    ] = "auto"
    served_name: (
        Annotated[ServedName, Meta(description="Name that clients use; metadata.name when left out.")] | None
    ) = None
    aliases: Annotated[
        list[ServedName],
        Meta(
            max_length=16,
            description="Further names that clients may use.",
            extra_json_schema={"x-kubernetes-list-type": "set"},
        ),
    ] = field(default_factory=list)
    tensor_parallel: Annotated[
        int, Meta(ge=1, le=16, description="Accelerators each pod spreads the model over.")
    ] = 1
    replicas: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=1000,
                description="Pods; set by kubectl scale and autoscalers too. Left out: the number stays, and "
                "a new service gets 1.",
            ),
        ]
        | None
    ) = None
    """No default in the schema: the API server would write it whenever an apply leaves the field out, and
    take a service that an autoscaler has scaled back to it."""
    autoscaling: (
        Annotated[
            Autoscaling,
            Meta(description="Replicas by requests in flight; steps aside while an HPA targets the service."),
        ]
        | None
    ) = None
    engine: EngineOptions = field(default_factory=EngineOptions)
    accelerator: Annotated[Accelerator, Meta(description="What the pods run on, and where.")] = field(
        default_factory=Accelerator
    )
    cache: Cache | None = None
    token_secret_ref: (
        Annotated[SecretKey, Meta(description="The hub's token, for hf:// models that need one.")] | None
    ) = None
    rollout: Annotated[Rollout, Meta(description="How pods are replaced when their template changes.")] = (
        field(default_factory=Rollout)
    )
    pod_template: Annotated[
        dict[str, Any] | None,
        Meta(
            description="Strategic merge patch over the operator's pod template; it overrides other fields."
        ),
    ] = None
    image: Annotated[
        str, Meta(min_length=1, max_length=1024, description="Engine image; the operator's default.")
    ] | (None) = None
    priority_class_name: (
        Annotated[str, Meta(max_length=253, description="PriorityClass of the pods.")] | None
    ) = None


class Condition(SpecObject, kw_only=True):
    """As in meta/v1."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""
    last_transition_time: str
    """RFC 3339; moves only when `status` does."""
    observed_generation: int | None = None


class InferenceServiceStatus(SpecObject, kw_only=True):
    observed_generation: Annotated[
        int, Meta(description="metadata.generation that this status describes.")
    ] = 0
    replicas: Annotated[int, Meta(description="Number of pods.")] = 0
    ready_replicas: Annotated[int, Meta(description="Pods that are ready.")] = 0
    updated_replicas: Annotated[int, Meta(description="Pods of the newest template.")] = 0
    desired_replicas: Annotated[int, Meta(description="Pods that are wanted.")] = 0
    selector: Annotated[str, Meta(description="Label selector of the pods, for /scale.")] = ""
    url: Annotated[str, Meta(description="Base URL of the OpenAI API.")] = ""
    served_name: Annotated[str, Meta(description="Name that clients use for the model.")] = ""
    retained_claim: Annotated[
        str,
        Meta(description="Claim that cache no longer uses and that is kept with its models; empty: none."),
    ] = ""
    names: Annotated[
        list[str], Meta(description="Names that lead clients of the gateway to this service.")
    ] = field(default_factory=list)
    service_uid: Annotated[
        str, Meta(description="uid of the Service in front of the pods: gateways look at its slices only.")
    ] = ""
    conditions: Annotated[
        list[Condition],
        Meta(
            description="Ready, ModelAvailable, Progressing, NamesAccepted, with autoscaling Autoscaling "
            "(docs/troubleshooting.md).",
            extra_json_schema={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = field(default_factory=list)
