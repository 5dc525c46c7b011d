"""The techniques: settings that switch each on and off, and whether this machine can run it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from leadline.engine.config import EngineConfig
from leadline.engine.system.cpu_limit import usable_cores

__all__ = ["TECHNIQUES", "Machine", "Technique"]


@dataclass(slots=True, frozen=True)
class Machine:
    """What decides which techniques run."""

    gpus: int
    cores: int
    fp8: bool
    """A GPU whose tensor cores multiply 8-bit floats."""

    @staticmethod
    def this(device: str) -> Machine:
        """`device`: as EngineConfig's."""
        import torch

        gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
        fp8 = gpus > 0 and torch.cuda.get_device_capability() >= (8, 9)
        return Machine(gpus, usable_cores(), fp8)


@dataclass(slots=True, frozen=True)
class Technique:
    name: str
    workload: str
    """Of workloads.WORKLOADS: the one that it is meant for."""
    on: dict[str, Any]
    off: dict[str, Any]
    """Changes to the engine's settings, which are otherwise the same on both sides."""
    missing: Callable[[Machine], str | None] = field(default=lambda machine: None)
    """Why this machine cannot run it; None: it can."""
    most_requests: int | None = None
    """Of a run, where a side answers one after the other."""
    further_processes: bool = False
    """It starts processes that end when this one hangs."""

    def cannot_run(self, machine: Machine) -> str | None:
        known = {setting.name for setting in dataclasses.fields(EngineConfig)}
        if unknown := (set(self.on) | set(self.off)) - known:
            return f"this version has no {', '.join(sorted(unknown))}"
        return self.missing(machine)


def _needs_gpu(machine: Machine) -> str | None:
    return None if machine.gpus else "needs a GPU"


def _needs_two(machine: Machine) -> str | None:
    if machine.gpus:
        return None if machine.gpus > 1 else "needs two GPUs of one host; one is here"
    return None if machine.cores > 1 else "needs two cores"


TECHNIQUES = (
    Technique(
        "dynamic batching", "shared prefix", on={}, off={"max_concurrent_requests": 1}, most_requests=16
    ),
    Technique("prefix cache", "shared prefix", on={"prefix_caching": True}, off={"prefix_caching": False}),
    Technique(
        "tensor parallel 2",
        "shared prefix",
        on={"tensor_parallel": 2},
        off={"tensor_parallel": 1},
        missing=_needs_two,
        further_processes=True,
    ),
    Technique(
        "CUDA graphs",
        "shared prefix",
        on={"enforce_eager": False},
        off={"enforce_eager": True},
        missing=_needs_gpu,
    ),
    Technique("overlap scheduling", "shared prefix", on={"overlap": True}, off={"overlap": False}),
    Technique(
        "FP8 weights",
        "shared prefix",
        on={"quantization": "fp8"},
        off={"quantization": None},
        missing=lambda machine: (
            None
            if machine.fp8
            else "needs a GPU with FP8 tensor cores (on CPU it is a reference, not faster)"
        ),
    ),
    Technique(
        "FP8 KV cache",
        "shared prefix",
        on={"kv_cache_dtype": "fp8"},
        off={"kv_cache_dtype": "auto"},
        missing=lambda machine: (
            None if machine.fp8 else "needs a GPU with FP8 support (on CPU it is a reference, not faster)"
        ),
    ),
    Technique(
        "n-gram speculation",
        "copying",
        on={"speculative_ngram": 6, "speculative_match": 2},
        off={"speculative_ngram": 0},
    ),
)
