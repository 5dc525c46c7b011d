"""How many KV blocks this process's device holds, by running what must find room beside them.

memory.py has the arithmetic and the drawing; here are the largest step, run once, and the largest graphs,
captured once.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from leadline.engine.config import EngineConfig
from leadline.engine.core.plan import NewSeq, StepPlan, StepRow
from leadline.engine.errors import OutOfMemory
from leadline.engine.models.base import CausalLM
from leadline.engine.runner.assemble import kv_dtype, make_graphs, make_runner
from leadline.engine.runner.memory import block_bytes, fit_context, gpu_kv_bytes, out_of_memory_is_typed
from leadline.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from leadline.engine.runner.parallel.group import RankGroup

__all__ = ["size_pool"]

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
