"""`model_size`: parameters as transformers counts them, and the KV pools that were measured on an H200."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_checkpoints import ARCHITECTURES, build_reference

from leadline.engine.models.config import load_model_config
from leadline.engine.models.size import GPUS, model_size


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_that_transformers_counts(family: str, tied: bool, tmp_path: Path) -> None:
    model = build_reference(family, tie_word_embeddings=tied)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    assert model_size(load_model_config(tmp_path)).parameters == model.num_parameters()


QWEN3_8B = """{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936,
  "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
  "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
  "rope_theta": 1000000, "tie_word_embeddings": false, "hidden_act": "silu", "torch_dtype": "bfloat16"}"""


@pytest.mark.parametrize(
    ("options", "measured"),
    [
        ({}, 778_304),
        ({"fp8_weights": True}, 822_784),
        ({"fp8_kv": True}, 1_553_216),
        ({"fp8_weights": True, "fp8_kv": True}, 1_642_496),
    ],
)
def test_the_tokens_that_fit_are_those_measured_on_an_h200(
    options: dict[str, bool], measured: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(QWEN3_8B)
    size = model_size(load_model_config(tmp_path), **options)
    tokens = size.kv_bytes(GPUS["h200"] << 20, 0.9) // size.kv_per_token
    assert tokens == pytest.approx(measured, rel=0.02)


def test_ranks_share_heads_and_mlp_and_replicate_kv_heads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(QWEN3_8B)
    config = load_model_config(tmp_path)
    alone, eight, sixteen = (model_size(config, tensor_parallel=ranks) for ranks in (1, 8, 16))
    assert eight.kv_per_token * 8 == alone.kv_per_token
    assert sixteen.kv_per_token == eight.kv_per_token  # one KV head of eight on each of sixteen ranks
    assert alone.weights / 8 < eight.weights < 1.01 * alone.weights / 8
    assert eight.parameters == alone.parameters
