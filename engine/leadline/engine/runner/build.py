"""From an EngineConfig to a runner: device, dtype, weights, context length, pool size."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from leadline.engine.attention import AttentionSpec, make_backend
from leadline.engine.config import EngineConfig
from leadline.engine.core.plan import NewSeq, StepPlan, StepRow
from leadline.engine.errors import ConfigError, OutOfMemory
from leadline.engine.hub.local import LocalModel
from leadline.engine.models.base import CausalLM
from leadline.engine.models.config import ModelConfig
from leadline.engine.models.fp8 import FP8, check_fp8_linear, has_fp8
from leadline.engine.models.loader import load_model
from leadline.engine.progress import ReportStage, no_report
from leadline.engine.runner.memory import block_bytes, fit_context, gpu_kv_bytes, out_of_memory_is_typed
from leadline.engine.runner.model_runner import ModelRunner, allocate_kv
from leadline.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from leadline.engine.models.parallel import TensorParallel
    from leadline.engine.runner.parallel import ParallelRunner
    from leadline.engine.runner.parallel.group import RankGroup

__all__ = ["build_runner", "build_shard", "resolve_context", "resolve_device", "resolve_dtype"]

logger = logging.getLogger("leadline.engine.runner")

_BYTES_A_GRAPH = 2 << 20
"""Of a graph itself; the pool and buffers that all of them share are measured."""


def resolve_device(config: EngineConfig) -> torch.device:
    """Raises ConfigError if CUDA is asked for and absent."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no CUDA device; use 'auto' or 'cpu'")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(config: EngineConfig, model_config: ModelConfig, device: torch.device) -> torch.dtype:
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


def kv_dtype(config: EngineConfig, model: CausalLM) -> torch.dtype:
    """What the KV cache holds."""
    return FP8 if config.kv_cache_dtype == "fp8" else model.dtype


def set_cpu_threads(config: EngineConfig) -> None:
    """`cpu_threads`, or every core this process may use unless OMP_NUM_THREADS says otherwise."""
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))


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
    from leadline.engine.runner.parallel import build_parallel_runner

    return build_parallel_runner(config, local, model_config, progress=progress, report=report)


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
    """`build_runner` for the one device of this process: `group`'s rank, or the only one."""
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
    num_blocks, length = _size_pool(config, model, length, device, group)
    with out_of_memory_is_typed(config, "while allocating the KV cache"):
        runner = _make_runner(config, model, num_blocks, length, device)
    if _wants_graphs(config):
        if device.type == "cuda":
            report("capturing CUDA graphs", None, "")
        with out_of_memory_is_typed(config, "while capturing CUDA graphs"):
            _capture(config, runner, group)
    return runner, length


def _collectives(
    config: EngineConfig, group: RankGroup, model_config: ModelConfig, dtype: torch.dtype
) -> TensorParallel:
    from leadline.engine.runner.parallel.fabric import FabricSpec

    return group.tensor_parallel(
        FabricSpec(
            hidden=model_config.hidden_size,
            vocab=model_config.vocab_size,
            dtype=dtype,
            max_tokens=config.max_num_batched_tokens,
            max_rows=config.max_concurrent_requests,
        )
    )


def _agree(group: RankGroup | None) -> Callable[[bool], bool]:
    """What all ranks say: ranks that captured different graphs would wait for each other for ever."""
    return bool if group is None else lambda opinion: bool(group.least(opinion))


def _wants_graphs(config: EngineConfig) -> bool:
    return not config.enforce_eager


def _longest_chunk(config: EngineConfig, length: int) -> int:
    return min(config.max_num_batched_tokens, config.prefill_chunk or length, length)


def _capture(config: EngineConfig, runner: ModelRunner, group: RankGroup | None) -> None:
    graphs = runner.make_graphs(_longest_chunk(config, runner.max_model_len), _agree(group))
    if graphs is None:
        return
    report = graphs.capture()
    runner.graphs, runner.graph_report = graphs, report
    logger.info(
        "captured CUDA graphs: %d of 1 to %d decode rows, %d of chunks up to %d tokens; %.1f s, %.0f MiB",
        report.graphs,
        graphs.sizes[-1],
        report.prefill_graphs,
        max(graphs.prefill.lengths, default=0),
        report.seconds,
        report.bytes / 2**20,
    )


def _size_pool(
    config: EngineConfig, model: CausalLM, length: int, device: torch.device, group: RankGroup | None
) -> tuple[int, int]:
    size = block_bytes(model, config.block_size, kv_dtype(config, model))
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
    elif device.type == "cpu":
        num_blocks = config.cpu_kv_bytes // config.tensor_parallel // size
    else:
        with out_of_memory_is_typed(config, "in the profile run of the largest step"):
            available = gpu_kv_bytes(config, device, lambda: _profile(config, model, length, device))
            if _wants_graphs(config):
                available -= _graph_bytes(config, model, length, device, group)
        if available < size:
            total = torch.cuda.mem_get_info(device)[1]
            need = (size - available) / total
            raise OutOfMemory(
                "weights and activations leave no room for the KV cache at gpu_memory_utilization "
                f"{config.gpu_memory_utilization:g}: {-available / 2**20:,.0f} MiB too little. Raise it by "
                f"at least {need:.2f}, lower max_num_batched_tokens (now "
                f"{config.max_num_batched_tokens:,}) or max_concurrent_requests (now "
                f"{config.max_concurrent_requests:,}); max_model_len (now {length:,}) decides how much "
                "cache one sequence needs"
            )
        num_blocks = available // size
    if group is not None:
        num_blocks = group.least(num_blocks)
    return num_blocks, fit_context(config, length, num_blocks, size, device)


def _backend_name(config: EngineConfig, device: torch.device) -> str:
    """flash-attn reads no FP8 cache."""
    choose = config.attention_backend == "auto" and config.kv_cache_dtype == "fp8" and device.type == "cuda"
    return "triton" if choose else config.attention_backend


def _make_runner(
    config: EngineConfig, model: CausalLM, num_blocks: int, length: int, device: torch.device
) -> ModelRunner:
    spec = AttentionSpec(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        scale=model.head_dim**-0.5,
        dtype=model.dtype,
        device=device,
        max_rows=config.max_concurrent_requests,
        max_model_len=length,
    )
    return ModelRunner(
        model,
        make_backend(_backend_name(config, device), spec),
        allocate_kv(model, num_blocks, config.block_size, device, kv_dtype(config, model)),
        block_size=config.block_size,
        max_slots=config.max_concurrent_requests,
        max_model_len=length,
        device=device,
    )


def _profile(config: EngineConfig, model: CausalLM, length: int, device: torch.device) -> None:
    """One step of max_num_batched_tokens tokens with every row sampled the most expensive way.

    All layers share one layer's cache: the step's own tokens are all it has to hold.
    """
    budget, size, rows = config.max_num_batched_tokens, config.block_size, config.max_concurrent_requests
    longest = min(length, config.prefill_chunk or length)
    num_long = min(-(-budget // longest), rows)
    counts = [1] * (rows - num_long)
    rest = budget - len(counts)
    for _ in range(num_long):
        counts.append(max(1, min(rest, longest)))
        rest -= counts[-1]
    counts.sort()
    needs = [-(-count // size) for count in counts]
    one_layer = _OneLayerView(model)
    runner = _make_runner(config, one_layer, sum(needs), length, device)
    runner.model, runner.kv_cache = model, runner.kv_cache * model.num_layers
    plan, first = StepPlan(0), 0
    # The sampling of every feature at once peaks highest: float32 logits, a sort, noise, counts.
    sampling = SamplingParams(temperature=1.0, top_p=0.9, logprobs=config.max_logprobs)
    for slot, (count, need) in enumerate(zip(counts, needs, strict=True)):
        blocks = list(range(first, first + need))
        first += need
        plan.entered.append(NewSeq(slot, slot, [0] * count, count, sampling, slot, blocks))
        plan.rows.append(StepRow(slot, 0, count, True))
    runner.launch(plan).wait()


def _graph_bytes(
    config: EngineConfig, model: CausalLM, length: int, device: torch.device, group: RankGroup | None
) -> int:
    """Device memory that graphs will take: the largest are captured for real, and show what the pool that
    all of them share needs."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(device)[0]
    runner = _make_runner(config, _OneLayerView(model), 1, length, device)
    runner.model, runner.kv_cache = model, runner.kv_cache * model.num_layers
    graphs = runner.make_graphs(_longest_chunk(config, length), _agree(group))
    need = 0
    if graphs is not None:
        graphs.capture(everything=False)
        need = before - torch.cuda.mem_get_info(device)[0]
        need += _BYTES_A_GRAPH * (len(graphs.sizes) + 2 * len(graphs.prefill.lengths))
    del graphs, runner
    gc.collect()
    torch.cuda.empty_cache()
    return max(need, 0)


class _OneLayerView:
    """A model's shapes with a single layer, to allocate one layer's cache."""

    num_layers = 1

    def __init__(self, model: CausalLM) -> None:
        self.num_heads = model.num_heads
        self.num_kv_heads = model.num_kv_heads
        self.head_dim = model.head_dim
        self.vocab_size = model.vocab_size
        self.dtype = model.dtype
