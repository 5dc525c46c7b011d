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

import torch

from leadline.engine.config import EngineConfig
from leadline.engine.errors import OutOfMemory
from leadline.engine.models.base import CausalLM

__all__ = ["block_bytes", "fit_context", "gpu_kv_bytes", "oom_message", "out_of_memory_is_typed"]


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
    """What to tell whoever ran out of device memory, with the settings that matter and their values."""
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
