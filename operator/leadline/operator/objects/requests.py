"""CPU and memory that an engine's pod asks for where its service does not say: without requests a pod is of
the class BestEffort, gets what others leave of the CPU and is evicted first.

Pure. What the service says wins, resource by resource, and so does what a LimitRange of the
namespace gives containers that do not say. Requests only: a limit is the service's to set.
"""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal
from typing import Any

from leadline.operator.objects.context import ServiceContext
from leadline.operator.quantities import quantity

__all__ = ["add_default_requests", "parameters_of"]

_MEBI = 1 << 20
_DEMO_MODEL = "smollm2"
_DEMO_PARAMETERS = 134_515_008
_PARAMETERS = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![\w])", re.I)
_QUANTIZED = re.compile(r"awq|gptq|gguf|bnb|quant|fp8|fp4|int[48]|w[48]a|[48]-?bit", re.I)


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
