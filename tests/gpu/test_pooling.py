"""Models that embed and rerank on a GPU: in float32 as on the CPU, in 16 bits close to it, and how fast."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leadline.engine.config import EngineConfig
from leadline.engine.hub.local import LocalModel
from leadline.engine.messages import PoolingRequest
from leadline.engine.pooling.core import PoolingCore
from leadline.engine.pooling.spec import read_pooling
from tiny_encoders import rows, write_model

pytestmark = pytest.mark.gpu

FORMS = {
    "BertModel": {},
    "XLMRobertaModel": {},
    "BertForSequenceClassification": {"num_labels": 1},
    "Qwen3ForCausalLM": {},
}


def values(folder: Path, inputs: list[list[int]], **settings: Any) -> np.ndarray:
    task = "embed" if "Qwen3" in folder.name else "auto"
    config = EngineConfig(model=str(folder), task=task, **settings).validate()
    spec = read_pooling(folder, config)
    assert spec is not None
    core = PoolingCore(config, LocalModel(folder, "m", "r"), spec, progress=False)
    core.add_request(PoolingRequest(request_id="a", inputs=inputs, arrival=time.monotonic()))
    while not (outputs := core.step()):
        pass
    return rows(outputs[0], len(inputs))


@pytest.mark.parametrize("architecture", FORMS)
def test_a_gpu_gives_what_a_cpu_gives(architecture: str, tmp_path: Path) -> None:
    folder = tmp_path / architecture
    folder.mkdir()
    write_model(folder, architecture, **FORMS[architecture])
    inputs = [
        [5 + (7 * start + at) % 70 for at in range(length)] for start, length in enumerate((1, 40, 3, 17, 33))
    ]
    expected = values(folder, inputs, device="cpu", dtype="float32")
    np.testing.assert_allclose(values(folder, inputs, device="cuda", dtype="float32"), expected, atol=1e-3)
    half = values(folder, inputs, device="cuda", dtype="bfloat16")
    assert np.abs(half - expected).mean() < 0.05 * max(1.0, float(np.abs(expected).mean()))


def test_the_rate_of_a_base_sized_encoder_is_printed(tmp_path: Path) -> None:
    shape = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    }
    write_model(tmp_path, "BertModel", max_position_embeddings=512, initializer_range=0.02, **shape)
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16", device="cuda").validate()
    spec = read_pooling(tmp_path, config)
    assert spec is not None
    core = PoolingCore(config, LocalModel(tmp_path, "m", "r"), spec, progress=False)
    for count, length in ((256, 32), (64, 128), (16, 512)):
        inputs, bounds = [[7] * length] * count, [None] * count
        core.runner.run(inputs, bounds)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            core.runner.run(inputs, bounds)
        rate = 10 * count * length / (time.perf_counter() - began)
        print(f"BERT base, bfloat16, {count} inputs of {length} tokens: {rate:,.0f} tokens/s")
        assert rate > 100_000
