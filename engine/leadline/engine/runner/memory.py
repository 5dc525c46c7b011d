"""How many KV blocks fit, and what to say when they do not.

CPU: `cpu_kv_bytes` over the bytes of a block. CUDA: one step of the largest size is run for real (a profile
run) and its peak measured;

    | weights + largest activations + sampler (measured peak) | outside torch | KV cache             | left
    free | |<------------------------ gpu_memory_utilization x total memory ------------------------------->|
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from leadline.engine.config import EngineConfig
from leadline.engine.core.plan import NewSeq, StepPlan, StepRow
from leadline.engine.errors import OutOfMemory
from leadline.engine.models.base import CausalLM
from leadline.engine.runner.assemble import kv_dtype, make_graphs, make_runner
from leadline.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from leadline.engine.runner.collectives.group import RankGroup

__all__ = ["block_bytes", "fit_context", "gpu_kv_bytes", "oom_message", "out_of_memory_is_typed", "size_pool"]


def block_bytes(model: CausalLM, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one KV block over all layers, keys and values, in a cache of `dtype`."""
    return 2 * model.num_layers * block_size * model.num_kv_heads * model.head_dim * dtype.itemsize


def gpu_kv_bytes(config: EngineConfig, device: torch.device, profile: Callable[[], None]) -> int:
    """Bytes left for the KV cache after `profile` ran the largest step. May be negative."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    profile()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    outside = max(0, total - free - torch.cuda.memory_reserved(device))
    gc.collect()
    torch.cuda.empty_cache()
    return int(config.gpu_memory_utilization * total) - peak - outside


def fit_context(
    config: EngineConfig, max_model_len: int, num_blocks: int, bytes_a_block: int, device: torch.device
) -> int:
    """The context length that the pool can hold: `max_model_len`, cut if the caller left it open.

    Raises OutOfMemory when no block fits, or when the caller asked for more than fits.
    """
    size = config.block_size
    held = num_blocks * size
    if num_blocks >= 1 and (held >= max_model_len or config.num_kv_blocks is not None):
        return max_model_len if config.max_model_len is not None else min(max_model_len, held)
    if num_blocks >= 1 and config.max_model_len is None:
        return held
    needed = -(-max_model_len // size) * bytes_a_block
    have = max(num_blocks, 0) * bytes_a_block
    if device.type == "cpu":
        knob = f"raise cpu_kv_bytes (now {config.cpu_kv_bytes:,})"
    else:
        knob = (
            f"raise gpu_memory_utilization (now {config.gpu_memory_utilization:g}), lower "
            f"max_num_batched_tokens (now {config.max_num_batched_tokens:,}), which bounds activations,"
        )
    fits = f"{max(held, 0):,} tokens fit" if num_blocks >= 1 else "not one block fits"
    raise OutOfMemory(
        f"one sequence of max_model_len {max_model_len:,} tokens needs {_mib(needed)} of KV cache and "
        f"{_mib(have)} are there: {fits}. Either {knob} or set max_model_len"
        + (f" to at most {held:,}." if num_blocks >= 1 else " lower and use a smaller model.")
    )


def oom_message(config: EngineConfig, when: str, max_model_len: int | None = None) -> str:
    """Return the message of an OutOfMemory, with the settings that matter and their values."""
    length: int | str | None = config.max_model_len if max_model_len is None else max_model_len
    if length is None:
        length = "the model's limit"
    return (
        f"out of device memory {when}. Lower max_num_batched_tokens (now "
        f"{config.max_num_batched_tokens:,}), which bounds activations; lower gpu_memory_utilization (now "
        f"{config.gpu_memory_utilization:g}), if the device is shared; lower max_model_len (now {length}), "
        f"or use tensor_parallel (now {config.tensor_parallel}), if the weights do not fit"
    )


@contextmanager
def out_of_memory_is_typed(config: EngineConfig, when: str) -> Iterator[None]:
    """Turn torch's out-of-memory errors into ours."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"{oom_message(config, when)}. ({str(error).splitlines()[0]})") from error


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


_BYTES_A_GRAPH = 2 << 20
"""Of a graph itself; the pool and buffers that all of them share are measured."""


def size_pool(
    config: EngineConfig, model: CausalLM, length: int, device: torch.device, group: RankGroup | None
) -> tuple[int, int]:
    """Blocks of the pool, and the context length that it can serve, at most `length`; with a group the least
    of all ranks. Raises OutOfMemory."""
    size = block_bytes(model, config.block_size, kv_dtype(config, model))
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
    elif device.type == "cpu":
        num_blocks = config.cpu_kv_bytes // config.tensor_parallel // size
    else:
        with out_of_memory_is_typed(config, "in the profile run of the largest step"):
            available = gpu_kv_bytes(config, device, lambda: _profile(config, model, length, device))
            if not config.enforce_eager:
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
    runner = make_runner(config, one_layer, sum(needs), length, device)
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
    runner = make_runner(config, _OneLayerView(model), 1, length, device)
    runner.model, runner.kv_cache = model, runner.kv_cache * model.num_layers
    graphs = make_graphs(config, runner, length, group)
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
    """A model's shapes with a single layer, to allocate one layer's cache. The windows are those of all."""

    num_layers = 1

    def __init__(self, model: CausalLM) -> None:
        self.num_heads = model.num_heads
        self.num_kv_heads = model.num_kv_heads
        self.head_dim = model.head_dim
        self.windows = model.windows
        self.attention_scale, self.attention_softcap = model.attention_scale, model.attention_softcap
        self.vocab_size = model.vocab_size
        self.dtype = model.dtype
