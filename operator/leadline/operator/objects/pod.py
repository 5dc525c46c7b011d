"""The pod template: one engine container over `tensorParallel` accelerators, admitted by the restricted level
of Pod Security.

Everything that writes goes to a volume, for the root file system is read-only:

    /cache     downloaded and converted models: the cache claim, or an emptyDir
    /tmp       scratch
    /dev/shm   shared memory of the ranks, in RAM
    /model     the claim of a pvc:// model, read-only
    /etc/leadline   warm-up prompts
"""

from __future__ import annotations

from typing import Any

from leadline.operator.names import (
    CONTAINER,
    PORT,
    PORT_NAME,
    child_labels,
    redis_secret_name,
    selector_labels,
)
from leadline.operator.objects.context import ServiceContext, digest, secret_digest
from leadline.operator.objects.support import warmup_text
from leadline.operator.strategic import strategic_merge
from leadline.protocol.isvc import label
from leadline.protocol.isvc_termination import TERMINATION_VARIABLE

__all__ = ["pod_template"]

USER = 65532
"""User and group of the container, and group of its volumes. Images must not need another."""
TERMINATION_LOG = "/dev/termination-log"
"""Kubernetes' own default; the kubelet mounts a file there that the container's user may write."""
_PRE_STOP_SECONDS = 5
"""Between the pod's removal from the endpoints and SIGTERM: gateways have stopped sending by then (P8)."""
_EXIT_SECONDS = 15
"""For the process to end after the drain."""
_PROBE_SECONDS = 2


def pod_template(context: ServiceContext) -> dict[str, Any]:
    """The template, with the service's `podTemplate` patch over it. The patch cannot take away the labels
    that the selector needs."""
    template: dict[str, Any] = {
        "metadata": {"labels": child_labels(context.name), "annotations": _annotations(context)},
        "spec": _pod_spec(context),
    }
    if context.spec.pod_template:
        template = strategic_merge(template, context.spec.pod_template)
        required = selector_labels(context.name) | {
            "app.kubernetes.io/managed-by": child_labels(context.name)["app.kubernetes.io/managed-by"]
        }
        metadata = template.setdefault("metadata", {})
        metadata["labels"] = {**(metadata.get("labels") or {}), **required}
    return template


def _annotations(context: ServiceContext) -> dict[str, str]:
    """Of what pods read only when they start: a change must start them anew."""
    annotations = {}
    if text := warmup_text(context):
        annotations[label("warmup-hash")] = digest(text)
    if context.redis_needs_secret:
        annotations[label("redis-hash")] = secret_digest(context.settings.redis_url, context.uid)
    return annotations


def _pod_spec(context: ServiceContext) -> dict[str, Any]:
    spec, accelerator = context.spec, context.spec.accelerator
    pod: dict[str, Any] = {
        "serviceAccountName": context.child,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _PRE_STOP_SECONDS + spec.rollout.drain_seconds + _EXIT_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        # Spread over hosts where there is a choice: one lost node then costs the fewest pods.
        "topologySpreadConstraints": [
            {
                "topologyKey": "kubernetes.io/hostname",
                "maxSkew": 1,
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": selector_labels(context.name)},
            }
        ],
        "containers": [_container(context)],
        "volumes": _volumes(context),
    }
    if accelerator.node_selector:
        pod["nodeSelector"] = dict(accelerator.node_selector)
    if accelerator.tolerations:
        names = {"toleration_seconds": "tolerationSeconds"}
        pod["tolerations"] = [
            {
                names.get(name, name): value
                for name in ("key", "operator", "value", "effect", "toleration_seconds")
                if (value := getattr(toleration, name)) is not None
            }
            for toleration in accelerator.tolerations
        ]
    if accelerator.runtime_class_name:
        pod["runtimeClassName"] = accelerator.runtime_class_name
    if spec.priority_class_name:
        pod["priorityClassName"] = spec.priority_class_name
    return pod


def _container(context: ServiceContext) -> dict[str, Any]:
    spec, settings = context.spec, context.settings
    default_image = settings.engine_image if context.on_gpu else settings.engine_cpu_image
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": spec.image or default_image,
        "command": ["leadline"],
        "args": ["serve", *_arguments(context)],
        "env": _environment(context),
        "ports": [{"name": PORT_NAME, "containerPort": PORT, "protocol": "TCP"}],
        # The port listens before the model is loaded; a process that ends while loading fails the pod at
        # once, and one that hangs is started anew after startupSeconds.
        "startupProbe": _probe("/ready", _PROBE_SECONDS, -(-spec.engine.startup_seconds // _PROBE_SECONDS)),
        "readinessProbe": _probe("/ready", _PROBE_SECONDS, 2),
        "livenessProbe": _probe("/health", 10, 6),
        "lifecycle": {"preStop": {"sleep": {"seconds": _PRE_STOP_SECONDS}}},
        # What the engine said last is what the status says of a crash: a typed error by name, else its log.
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": _mounts(context),
    }
    if context.on_gpu:
        count = str(spec.tensor_parallel)
        name = spec.accelerator.resource_name
        container["resources"] = {"limits": {name: count}, "requests": {name: count}}
    return container


def _probe(path: str, period: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": PORT_NAME},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _arguments(context: ServiceContext) -> list[str]:
    spec, engine = context.spec, context.spec.engine
    arguments = [
        _model_argument(spec.model),
        "--host=0.0.0.0",
        f"--port={PORT}",
        f"--served-name={context.served_name}",
        f"--drain-timeout={spec.rollout.drain_seconds}",
        f"--device={'cuda' if context.on_gpu else 'cpu'}",
        f"--tensor-parallel={spec.tensor_parallel}",
        "--log-format=json",
    ]
    for option, value in (
        ("max-model-len", engine.max_model_len),
        ("block-size", engine.block_size),
        ("gpu-memory-utilization", engine.gpu_memory_utilization),
        ("dtype", engine.dtype),
        ("max-concurrent-requests", engine.max_concurrent_requests),
    ):
        if value is not None:
            arguments.append(f"--{option}={value}")
    if engine.warmup_prompts:
        arguments.append("--warmup-file=/etc/leadline/warmup.txt")
    return arguments + list(engine.extra_args)


def _model_argument(model: str) -> str:
    """What `leadline serve` is given: a claim is a folder under /model, everything else is the engine's to
    fetch."""
    if not model.startswith("pvc://"):
        return model
    _, _, path = model.removeprefix("pvc://").partition("/")
    return f"/model/{path}".rstrip("/")


def _environment(context: ServiceContext) -> list[dict[str, Any]]:
    spec = context.spec
    environment: list[dict[str, Any]] = [
        _field("POD_IP", "status.podIP"),
        _field("LEADLINE_POD_NAME", "metadata.name"),
        _field("LEADLINE_POD_UID", "metadata.uid"),
        {"name": "LEADLINE_ADVERTISE_ADDRESS", "value": f"$(POD_IP):{PORT}"},
        {"name": "LEADLINE_SERVICE", "value": f"{context.namespace}/{context.name}"},
        {"name": "LEADLINE_CACHE", "value": "/cache/leadline"},
        {"name": "HF_HOME", "value": "/cache/huggingface"},
        {"name": "HOME", "value": "/tmp"},
        {"name": TERMINATION_VARIABLE, "value": TERMINATION_LOG},
    ]
    if spec.aliases:
        environment.append({"name": "LEADLINE_ALIASES", "value": ",".join(spec.aliases)})
    if context.redis_needs_secret:
        reference = {"name": redis_secret_name(context.name), "key": "url"}
        environment.append({"name": "LEADLINE_REDIS_URL", "valueFrom": {"secretKeyRef": reference}})
    elif context.settings.redis_url:
        environment.append({"name": "LEADLINE_REDIS_URL", "value": context.settings.redis_url})
    token = spec.token_secret_ref
    if token is not None:
        reference = {"name": token.name, "key": token.key}
        environment.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    if context.on_gpu and spec.tensor_parallel > 1:
        # All ranks live in this pod: they meet over loopback, and exchange data over NVLink, PCIe or
        # /dev/shm.
        environment += [
            {"name": "NCCL_SOCKET_IFNAME", "value": "lo"},
            {"name": "NCCL_IB_DISABLE", "value": "1"},
            {"name": "NCCL_DEBUG", "value": "WARN"},
        ]
    return environment


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _mounts(context: ServiceContext) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": "cache", "mountPath": "/cache"},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if context.spec.model.startswith("pvc://"):
        mounts.append({"name": "model", "mountPath": "/model", "readOnly": True})
    if context.spec.engine.warmup_prompts:
        mounts.append({"name": "config", "mountPath": "/etc/leadline", "readOnly": True})
    return mounts


def _volumes(context: ServiceContext) -> list[dict[str, Any]]:
    spec = context.spec
    shared_memory = f"{1 + spec.tensor_parallel // 2}Gi"
    cache: dict[str, Any] = {"name": "cache", "emptyDir": {}}
    if spec.cache is not None:
        cache = {"name": "cache", "persistentVolumeClaim": {"claimName": context.child}}
    volumes: list[dict[str, Any]] = [
        cache,
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}},
    ]
    if spec.model.startswith("pvc://"):
        claim = spec.model.removeprefix("pvc://").partition("/")[0]
        volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    if spec.engine.warmup_prompts:
        volumes.append({"name": "config", "configMap": {"name": context.child}})
    return volumes
