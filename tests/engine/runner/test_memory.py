"""What fits into memory, and the error when it does not."""

from __future__ import annotations

import pytest
import torch

from leadline.engine.config import EngineConfig
from leadline.engine.errors import ConfigError, OutOfMemory
from leadline.engine.runner.memory import fit_context, oom_message, out_of_memory_is_typed
from leadline.engine.runner.shard import resolve_device

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CONFIG = EngineConfig(model="smollm2", block_size=64)


def test_a_context_that_fits_is_left_alone():
    assert fit_context(CONFIG, 640, 10, 1000, CPU) == 640
    assert fit_context(CONFIG.replace(max_model_len=640), 640, 10, 1000, CPU) == 640


def test_a_context_nobody_asked_for_is_cut_to_the_pool():
    assert fit_context(CONFIG, 8192, 10, 1000, CPU) == 640


@pytest.mark.parametrize(
    ("device", "names"),
    [(CPU, ["cpu_kv_bytes"]), (GPU, ["gpu_memory_utilization", "max_num_batched_tokens"])],
)
def test_a_context_that_was_asked_for_and_does_not_fit_is_refused_with_what_would(device, names):
    """E28."""
    with pytest.raises(OutOfMemory) as raised:
        fit_context(CONFIG.replace(max_model_len=8192), 8192, 10, 1 << 20, device)
    text = str(raised.value)
    for part in ("max_model_len", "8,192", "128 MiB", "10 MiB", "640", *names):
        assert part in text, text


@pytest.mark.parametrize("blocks", [0, -5])
def test_a_pool_without_a_block_is_refused_even_if_the_context_was_left_open(blocks):
    with pytest.raises(OutOfMemory, match="not one block fits"):
        fit_context(CONFIG, 8192, blocks, 1 << 20, CPU)


def test_a_pool_size_set_by_hand_may_be_smaller_than_the_context():
    config = CONFIG.replace(num_kv_blocks=4, max_model_len=1024)
    assert fit_context(config, 1024, 4, 1000, CPU) == 1024
    assert fit_context(CONFIG.replace(num_kv_blocks=4), 1024, 4, 1000, CPU) == 256


def test_torchs_out_of_memory_becomes_ours_and_names_the_settings():
    with (
        pytest.raises(OutOfMemory) as raised,
        out_of_memory_is_typed(CONFIG.replace(max_model_len=777), "while testing"),
    ):
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.\nmore")
    text = str(raised.value)
    for part in ("while testing", "777", "gpu_memory_utilization", "max_num_batched_tokens", "20.00 GiB"):
        assert part in text
    assert "more" not in text
    assert "640" in oom_message(CONFIG, "in a step", 640)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no CUDA")
def test_cuda_is_refused_where_there_is_none():
    with pytest.raises(ConfigError, match="no CUDA device"):
        resolve_device(CONFIG.replace(device="cuda"))
    assert resolve_device(CONFIG) == CPU
