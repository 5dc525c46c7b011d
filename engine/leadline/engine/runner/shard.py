"""From an EngineConfig to the runner of one device: device, dtype, weights, context length."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import torch

from leadline.engine.config import EngineConfig
from leadline.engine.errors import ConfigError
from leadline.engine.hub.local import LocalModel
from leadline.engine.models.base import CausalLM
from leadline.engine.models.config import ModelConfig
from leadline.engine.models.encoder_config import EncoderConfig
from leadline.engine.models.fp8 import check_fp8_linear, has_fp8
from leadline.engine.models.loader import load_model
from leadline.engine.runner.assemble import make_graphs, make_runner
from leadline.engine.runner.memory import out_of_memory_is_typed, size_pool
from leadline.engine.runner.model_runner import ModelRunner
from leadline.engine.runner.split import StepSplitter
from leadline.engine.system.cpu_limit import usable_cores
from leadline.engine.system.progress import ReportStage, no_report

if TYPE_CHECKING:
    from leadline.engine.models.parallel import TensorParallel
    from leadline.engine.runner.collectives.group import RankGroup

__all__ = ["build_shard", "resolve_context", "resolve_device", "resolve_dtype"]

logger = logging.getLogger("leadline.engine.runner")

_SPLIT_VARIABLE = "LEADLINE_SPLIT_STEPS"


_LEAST_CAPABILITY = (9, 0)
"""The kernels wait for one another by an instruction (griddepcontrol) that older GPUs do not have."""


def resolve_device(config: EngineConfig) -> torch.device:
    """Return this process' device. Raises ConfigError for CUDA without a GPU, or with one too old."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no CUDA device; use 'auto' or 'cpu'")
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise ConfigError(
            f"the GPU {torch.cuda.get_device_name(device)} has compute capability {capability[0]}."
            f"{capability[1]}, and {_LEAST_CAPABILITY[0]}.{_LEAST_CAPABILITY[1]} or more is needed (Hopper, "
            "such as H100 and H200, and later); device 'cpu' runs without it"
        )
    return device


def resolve_dtype(
    config: EngineConfig, model_config: ModelConfig | EncoderConfig, device: torch.device
) -> torch.dtype:
    """auto: the checkpoint's on GPU, float32 on CPU."""
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else model_config.dtype
    return getattr(torch, name)  # type: ignore[no-any-return]


def resolve_context(config: EngineConfig, model_config: ModelConfig) -> int:
    """Tokens of the longest sequence, before the pool's size is known. Raises ConfigError above the
    model's."""
    limit = model_config.max_model_len
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is above the model's own limit of {limit} tokens; lower "
            "it, or set rope scaling in the model's config.json"
        )
    return config.max_model_len or limit


def check_fp8(config: EngineConfig, dtype: torch.dtype, device: torch.device, *, loaded: bool) -> None:
    """Raise ConfigError for FP8 settings that this device and dtype cannot serve. `loaded`: the model comes
    ready, its weights as they are."""
    if config.quantization is None and config.kv_cache_dtype == "auto":
        return
    if loaded:
        raise ConfigError("quantization and kv_cache_dtype are applied while loading: not to a loaded model")
    if config.quantization is not None:
        check_fp8_linear(f"quantization {config.quantization!r}", dtype, device)
    if config.kv_cache_dtype == "fp8" and device.type == "cuda" and not has_fp8(device):
        raise ConfigError(
            "kv_cache_dtype 'fp8' needs a GPU that converts FP8 (compute capability 8.9 or more: Ada, Hopper "
            "and later)"
        )


def set_cpu_threads(config: EngineConfig) -> None:
    """`cpu_threads`, or every core this process may use unless OMP_NUM_THREADS says otherwise."""
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_cores())


def build_shard(
    config: EngineConfig,
    local: LocalModel,
    model_config: ModelConfig,
    *,
    progress: bool = True,
    report: ReportStage = no_report,
    model: CausalLM | None = None,
    group: RankGroup | None = None,
) -> tuple[ModelRunner, int]:
    """Load this rank's part of the model and allocate its KV cache: `group`'s rank, or the only one. Returns
    the runner and the context length it can serve. Arguments and errors: see `build_runner`."""
    device = resolve_device(config)
    dtype = resolve_dtype(config, model_config, device)
    length = resolve_context(config, model_config)
    check_fp8(config, dtype, device, loaded=model is not None)
    if device.type == "cpu":
        set_cpu_threads(config)
    if model is None:
        with out_of_memory_is_typed(config, "while loading weights"):
            model = load_model(
                local,
                model_config,
                dtype=dtype,
                device=device,
                tp_rank=0 if group is None else group.rank,
                tp_size=config.tensor_parallel,
                collectives=None if group is None else _collectives(config, group, model_config, dtype),
                load_format=config.load_format,
                progress=progress,
                report=report,
                seed=config.seed,
                max_positions=length,
                quantization=config.quantization,
                fp8_kv=config.kv_cache_dtype == "fp8",
            )
    report("sizing the KV cache", None, "")
    num_blocks, length = size_pool(config, model, length, device, group)
    with out_of_memory_is_typed(config, "while allocating the KV cache"):
        runner = make_runner(config, model, num_blocks, length, device)
    if not config.enforce_eager:
        if device.type == "cuda":
            report("capturing CUDA graphs", None, "")
        with out_of_memory_is_typed(config, "while capturing CUDA graphs"):
            _capture(config, runner, group)
    return runner, length


def _collectives(
    config: EngineConfig, group: RankGroup, model_config: ModelConfig, dtype: torch.dtype
) -> TensorParallel:
    from leadline.engine.runner.collectives.fabric import FabricSpec, make_collectives

    spec = FabricSpec(
        hidden=model_config.hidden_size,
        vocab=model_config.vocab_size,
        dtype=dtype,
        max_tokens=config.max_num_batched_tokens,
        max_rows=config.max_concurrent_requests,
    )
    return make_collectives(group, spec)


def _capture(config: EngineConfig, runner: ModelRunner, group: RankGroup | None) -> None:
    graphs = make_graphs(config, runner, runner.max_model_len, group)
    if graphs is None:
        return
    report = graphs.capture()
    runner.graphs, runner.graph_report = graphs, report
    if graphs.prefill.lengths and os.environ.get(_SPLIT_VARIABLE) != "0":
        runner.splitter = StepSplitter(runner.tables, config.block_size, graphs.costs())
    logger.info(
        "captured CUDA graphs: %d of 1 to %d decode rows, %d of chunks up to %d tokens; %.1f s, %.0f MiB",
        report.graphs,
        graphs.sizes[-1],
        report.prefill_graphs,
        max(graphs.prefill.lengths, default=0),
        report.seconds,
        report.bytes / 2**20,
    )
