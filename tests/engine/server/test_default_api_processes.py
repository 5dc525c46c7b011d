"""How many API processes a server has that names no number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from leadline.engine.config import EngineConfig
from leadline.engine.server.process import pool

SMALL = {"hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072}
LARGE = {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288}


def processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, shape: dict, gpu: bool, cores: int, **settings
) -> int:
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen3ForCausalLM"],
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "vocab_size": 151936,
                "max_position_embeddings": 40960,
                **shape,
            }
        )
    )
    driver = folder / "driver"
    if gpu:
        driver.touch()
    monkeypatch.setattr(pool, "_GPU_DRIVER", driver)
    monkeypatch.setattr(pool, "usable_cores", lambda: cores)
    return pool.default_api_processes(EngineConfig(model=str(folder), **settings))


@pytest.mark.parametrize(
    ("shape", "gpu", "cores", "settings", "expected"),
    [
        (SMALL, False, 64, {}, 1),
        (SMALL, True, 64, {"device": "cpu"}, 1),
        (SMALL, True, 2, {}, 1),
        (SMALL, True, 4, {}, 1),
        (SMALL, True, 8, {}, 3),
        (SMALL, True, 16, {}, 4),
        (LARGE, True, 16, {}, 2),
        (LARGE, True, 16, {"tensor_parallel": 14}, 1),
        ({"hidden_size": "wrong"}, True, 16, {}, 4),
    ],
)
def test_api_processes_follow_the_cores_and_the_model(
    shape: dict, gpu: bool, cores: int, settings: dict, expected: int, tmp_path: Path, monkeypatch
) -> None:
    assert processes(tmp_path, monkeypatch, shape=shape, gpu=gpu, cores=cores, **settings) == expected
