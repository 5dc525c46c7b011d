"""A model, an attention backend and a KV cache put together: a runner, and the graphs of its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from leadline.engine.attention import AttentionSpec, make_backend
from leadline.engine.config import EngineConfig
from leadline.engine.models.base import CausalLM
from leadline.engine.models.fp8 import FP8
from leadline.engine.runner.model_runner import ModelRunner, allocate_kv

if TYPE_CHECKING:
    from leadline.engine.runner.collectives.group import RankGroup
    from leadline.engine.runner.graphs.decode import DecodeGraphs

__all__ = ["kv_dtype", "make_graphs", "make_runner"]


def kv_dtype(config: EngineConfig, model: CausalLM) -> torch.dtype:
    """What the KV cache holds."""
    return FP8 if config.kv_cache_dtype == "fp8" else model.dtype


def make_runner(
    config: EngineConfig, model: CausalLM, num_blocks: int, length: int, device: torch.device
) -> ModelRunner:
    """With a cache of num_blocks, for sequences of at most `length` tokens."""
    # A window that is no shorter than every context hides nothing.
    windows = tuple(None if window is None or window >= length else window for window in model.windows)
    spec = AttentionSpec(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        scale=model.attention_scale,
        dtype=model.dtype,
        device=device,
        max_rows=config.max_concurrent_requests,
        max_model_len=length,
        windows=tuple(dict.fromkeys(windows)),
        softcap=model.attention_softcap,
    )
    return ModelRunner(
        model,
        make_backend(_backend_name(config, device), spec),
        allocate_kv(model, num_blocks, config.block_size, device, kv_dtype(config, model)),
        windows=windows,
        block_size=config.block_size,
        max_slots=config.max_concurrent_requests,
        max_model_len=length,
        device=device,
    )


def make_graphs(
    config: EngineConfig, runner: ModelRunner, length: int, group: RankGroup | None
) -> DecodeGraphs | None:
    """Of all steps that sequences of at most `length` tokens can make, none captured yet."""
    longest_chunk = min(config.max_num_batched_tokens, config.prefill_chunk or length, length)
    if group is None:
        return runner.make_graphs(longest_chunk)
    # The smallest value of all ranks: ranks that captured different graphs would wait for each other forever.
    return runner.make_graphs(longest_chunk, group.least)


def _backend_name(config: EngineConfig, device: torch.device) -> str:
    """flash-attn reads no FP8 cache."""
    choose = config.attention_backend == "auto" and config.kv_cache_dtype == "fp8" and device.type == "cuda"
    return "triton" if choose else config.attention_backend
