"""The containers of a pod: the engine, and the download of an hf:// model before it. Pure.

An engine requests CPU and memory where its service does not say: without requests a pod is of the class
BestEffort, gets what others leave of the CPU and is evicted first. What the service says wins, resource by
resource, and so does what a LimitRange of the namespace gives to containers that request nothing. Limits are
only the service's to set.
"""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal
from typing import Any

from leadline.operator.names import (
    CONTAINER,
    DOWNLOAD_CONTAINER,
    PORT,
    PORT_NAME,
)
from leadline.operator.objects.context import ServiceContext
from leadline.operator.quantities import quantity
from leadline.protocol.isvc_termination import TERMINATION_VARIABLE

__all__ = [
    "PRE_STOP_SECONDS",
    "add_default_requests",
    "download_container",
    "engine_container",
    "is_downloaded",
    "parameters_of",
]

PRE_STOP_SECONDS = 5
"""Between the pod's removal from the endpoints and SIGTERM: gateways have stopped sending by then (P8)."""
_TERMINATION_LOG = "/dev/termination-log"
"""Kubernetes' own default; the kubelet mounts a file there that the container's user may write."""
_PROBE_SECONDS = 2
_REDIS_CREDENTIALS = "/etc/leadline-redis"
_MEBI = 1 << 20
_DEMO_MODEL = "smollm2"
_DEMO_PARAMETERS = 134_515_008
_PARAMETERS = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![\w])", re.I)
_QUANTIZED = re.compile(r"awq|gptq|gguf|bnb|quant|fp8|fp4|int[48]|w[48]a|[48]-?bit", re.I)


def engine_container(context: ServiceContext) -> dict[str, Any]:
    spec = context.spec
    container: dict[str, Any] = {
        "name": CONTAINER,
        "args": ["serve", *_arguments(context)],
        "env": _environment(context),
        "ports": [{"name": PORT_NAME, "containerPort": PORT, "protocol": "TCP"}],
        # The port listens before the model is loaded; a process that ends while loading fails the pod at
        # once, and one that hangs is started anew after startupSeconds.
        "startupProbe": _probe("/ready", _PROBE_SECONDS, -(-spec.engine.startup_seconds // _PROBE_SECONDS)),
        "readinessProbe": _probe("/ready", _PROBE_SECONDS, 2),
        "livenessProbe": _probe("/health", 10, 6),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
        "volumeMounts": _mounts(context),
        **_leadline(context),
    }
    if context.on_gpu:
        count = str(spec.tensor_parallel)
        name = spec.accelerator.resource_name
        container["resources"] = {"limits": {name: count}, "requests": {name: count}}
    return container


def download_container(context: ServiceContext) -> dict[str, Any]:
    """Fetches the model into the cache before an accelerator's process starts, and says on the engine's port
    how far it is. Only here is the hub's token known; the engine itself runs offline, so a restart of its
    container does not depend on the hub."""
    environment = _folders()
    if (token := context.spec.token_secret_ref) is not None:
        reference = {"name": token.name, "key": token.key}
        environment.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    if context.on_gpu:
        # Images for CUDA ask for all GPUs of the node, where the runtime lets them.
        environment.append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"})
    return {
        "name": DOWNLOAD_CONTAINER,
        "args": ["model-path", context.spec.model, f"--progress-port={PORT}"],
        "env": environment,
        "volumeMounts": [
            {"name": "cache", "mountPath": "/cache"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
        **_leadline(context),
    }


def _leadline(context: ServiceContext) -> dict[str, Any]:
    """What every container that runs our command has."""
    default_image = context.settings.engine_image if context.on_gpu else context.settings.engine_cpu_image
    return {
        "image": context.spec.image or default_image,
        "command": ["leadline"],
        # The status explains a crash by this message: the name of a typed error, else the end of the log.
        "terminationMessagePath": _TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _folders() -> list[dict[str, Any]]:
    return [
        {"name": "LEADLINE_CACHE", "value": "/cache/leadline"},
        {"name": "HF_HOME", "value": "/cache/huggingface"},
        {"name": "HOME", "value": "/tmp"},
        {"name": TERMINATION_VARIABLE, "value": _TERMINATION_LOG},
    ]


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
        "--host=::",
        f"--port={PORT}",
        f"--served-name={context.served_name}",
        f"--drain-timeout={spec.rollout.drain_seconds}",
        f"--device={'cuda' if context.on_gpu else 'cpu'}",
        f"--tensor-parallel={spec.tensor_parallel}",
        "--log-format=json",
    ]
    for option, value in (
        ("task", None if spec.task == "auto" else spec.task),
        ("max-model-len", engine.max_model_len),
        ("block-size", engine.block_size),
        ("gpu-memory-utilization", engine.gpu_memory_utilization),
        ("dtype", engine.dtype),
        ("quantization", None if engine.quantization == "none" else engine.quantization),
        ("kv-cache-dtype", None if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype),
        ("max-concurrent-requests", engine.max_concurrent_requests),
    ):
        if value is not None:
            arguments.append(f"--{option}={value}")
    if engine.warmup_prompts:
        arguments.append("--warmup-file=/etc/leadline/warmup.txt")
    if context.on_gpu and not any(one.partition("=")[0] == "--numa" for one in engine.extra_args):
        # A hint: a pod that may use no CPU beside its GPU runs where it may.
        arguments.append("--numa=auto")
    return arguments + list(engine.extra_args)


def is_downloaded(model: str) -> bool:
    return model.startswith("hf://")


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
        *_folders(),
    ]
    if is_downloaded(spec.model):
        environment.append({"name": "HF_HUB_OFFLINE", "value": "1"})
    if spec.aliases:
        environment.append({"name": "LEADLINE_ALIASES", "value": ",".join(spec.aliases)})
    if context.redis_place:
        environment.append({"name": "LEADLINE_REDIS_URL", "value": context.redis_place})
    if context.redis_login is not None:
        environment.append({"name": "LEADLINE_REDIS_CREDENTIALS", "value": _REDIS_CREDENTIALS})
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
    if context.redis_login is not None:
        mounts.append({"name": "redis", "mountPath": _REDIS_CREDENTIALS, "readOnly": True})
    return mounts


def add_default_requests(context: ServiceContext, pod: dict[str, Any], engine: dict[str, Any]) -> None:
    """Complete the container `engine` of the finished pod spec."""
    if pod.get("resources"):
        return  # of the pod as a whole: its containers share them
    resources = engine.get("resources") or {}
    said = {*(resources.get("requests") or {}), *(resources.get("limits") or {})}
    missing = {
        name: amount
        for name, amount in _defaults(context).items()
        if name not in said and name not in context.limited
    }
    if missing:
        engine["resources"] = {**resources, "requests": {**(resources.get("requests") or {}), **missing}}


def _defaults(context: ServiceContext) -> dict[str, str]:
    """On GPUs so much for each of them; on the CPU the model's weights come on top of the memory, where its
    size is known."""
    if context.on_gpu:
        count = context.spec.tensor_parallel
        return {
            name: amount if count == 1 else _spelled(name, quantity(amount) * count)
            for name, amount in context.settings.gpu_requests.items()
        }
    requests = dict(context.settings.cpu_requests)
    parameters = parameters_of(context.spec.model)
    if parameters and "memory" in requests:
        size = 2 if context.spec.engine.dtype in ("float16", "bfloat16") else 4
        requests["memory"] = _spelled("memory", quantity(requests["memory"]) + parameters * size)
    return requests


def parameters_of(model: str) -> int:
    """Return the parameters of the demo model, or the largest number in a hub model's name (0.6 billion for
    "Qwen3-0.6B", 30 for "30B-A3B"). Returns 0 where it is unknown, or where the weights are quantized and the
    number does not tell their size."""
    if model == _DEMO_MODEL:
        return _DEMO_PARAMETERS
    name = model.partition("@")[0].rpartition("/")[2]
    if not model.startswith("hf://") or _QUANTIZED.search(name):
        return 0
    found = _PARAMETERS.findall(name)
    return max((int(Decimal(number) * 10 ** (9 if unit in "bB" else 6)) for number, unit in found), default=0)


def _spelled(name: str, amount: Decimal) -> str:
    """As the API server spells it too, so that it is not taken for a change: memory in Mi, the rest in
    thousandths."""
    if name == "memory":
        mebi = int((amount / _MEBI).to_integral_value(ROUND_CEILING))
        return f"{mebi // 1024}Gi" if mebi % 1024 == 0 else f"{mebi}Mi"
    thousandths = int((amount * 1000).to_integral_value(ROUND_CEILING))
    return str(thousandths // 1000) if thousandths % 1000 == 0 else f"{thousandths}m"
