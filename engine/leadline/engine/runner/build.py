"""From an EngineConfig to a runner: of this process alone, or of several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leadline.engine.config import EngineConfig
from leadline.engine.errors import ConfigError
from leadline.engine.hub.local import LocalModel
from leadline.engine.models.base import CausalLM
from leadline.engine.models.config import ModelConfig
from leadline.engine.runner.model_runner import ModelRunner
from leadline.engine.runner.shard import build_shard
from leadline.engine.system.progress import ReportStage, no_report

if TYPE_CHECKING:
    from leadline.engine.runner.parallel import ParallelRunner

__all__ = ["build_runner"]


def build_runner(
    config: EngineConfig,
    local: LocalModel,
    model_config: ModelConfig,
    *,
    progress: bool = True,
    report: ReportStage = no_report,
    model: CausalLM | None = None,
) -> tuple[ModelRunner | ParallelRunner, int]:
    """Load the model and allocate its KV cache. Returns the runner and the context length it can serve.

    With tensor_parallel > 1 this starts the other ranks' processes. `model`: one that is loaded already (on
    the device and in the dtype that `config` says), to be shared; for one rank only.
    Raises ConfigError, UnsupportedModel, ModelNotFound, OutOfMemory.
    """
    if config.tensor_parallel == 1:
        return build_shard(config, local, model_config, progress=progress, report=report, model=model)
    if model is not None:
        raise ConfigError(
            f"a loaded model is whole and cannot serve tensor_parallel {config.tensor_parallel}"
        )
    from leadline.engine.runner.parallel import build_parallel_runner  # torch.distributed takes its time

    return build_parallel_runner(config, local, model_config, progress=progress, report=report)
