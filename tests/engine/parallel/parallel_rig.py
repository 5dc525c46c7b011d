"""Engine cores over several ranks, closed when a test is through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
from tiny_checkpoints import build_reference, save_reference

from leadline.engine.config import EngineConfig
from leadline.engine.core_process.engine_core import EngineCore
from leadline.engine.hub.local import LocalModel

__all__ = ["ParallelRig", "processes", "tiny_model"]


def tiny_model(folder: Path, family: str, **shape: Any) -> LocalModel:
    """Random weights; no tokenizer, which a core does not need."""
    return LocalModel(save_reference(build_reference(family, **shape), folder), "tiny", "1")


class ParallelRig:
    def __init__(self, local: LocalModel) -> None:
        self.local = local
        self._cores: list[EngineCore] = []

    def core(self, size: int, local: LocalModel | None = None, **settings: Any) -> EngineCore:
        settings = {"max_concurrent_requests": 64, "cpu_kv_bytes": 1 << 28, "max_model_len": 512, **settings}
        config = EngineConfig(model="any", device="cpu", cpu_threads=1, tensor_parallel=size, **settings)
        core = EngineCore(config, local or self.local, progress=False)
        self._cores.append(core)
        return core

    def close(self) -> None:
        for core in self._cores:
            if core.config.tensor_parallel > 1:
                core.runner.close()


def processes(core: EngineCore) -> list[psutil.Process]:
    """The workers, rank 1 first."""
    return [psutil.Process(worker.process.pid) for worker in core.runner.ranks.workers]
