"""`model_size`: parameters as transformers counts them, and the KV pools that were measured on an H200."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import ARCHITECTURES, build_reference

from leadline.engine.models import forms
from leadline.engine.models.config import load_model_config
from leadline.engine.models.decoder import Decoder
from leadline.engine.models.forms import allocate_matrices
from leadline.engine.models.parallel import TensorParallel
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


W4A16 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FORMS: dict[str, dict[str, Any]] = {
    "w4a16": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": W4A16}},
        "ignore": ["lm_head", "re:.*layers\\.0\\..*o_proj"],
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32},
    "gptq_rows": {"quant_method": "gptq", "bits": 8, "group_size": -1},
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "fp8": {"quant_method": "fp8", "ignored_layers": ["lm_head", "k_proj"]},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32},
    "qwen3_moe": {"hidden_size": 256, "moe_intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32},
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_weights_of_quantized_checkpoints_are_those_that_a_gpu_keeps(
    form: str, family: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted on a model whose linears are allocated as on a GPU, on the meta device."""
    model = build_reference(family, **SHAPES[family], vocab_size=104)
    model.config.architectures = [type(model).__name__]
    model.config.dtype, model.config.quantization_config = torch.bfloat16, FORMS[form]
    model.config.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    collectives = TensorParallel(ranks - 1, ranks, all_reduce=abs, all_gather=abs)
    decoder = Decoder(
        config, dtype=torch.bfloat16, device=torch.device("cpu"), tp=collectives, matrices_later=True
    )
    monkeypatch.setattr(forms, "has_fp8", lambda device: True)
    monkeypatch.setattr(forms, "_is_gpu", lambda device: True)
    monkeypatch.setattr(forms, "_multiplies_groups", lambda dtype: True)
    allocate_matrices(decoder, config.quantized.of, None)
    held = {id(decoder.norm.weight): decoder.norm.weight}
    for part in (decoder.embed, decoder.head.rows):
        held[id(part.weight)] = part.weight
    for layer in decoder.layers:
        for _, slot in layer.slots("model.layers.0"):
            held[id(slot.target)] = slot.target
    assert model_size(config, tensor_parallel=ranks).weights == sum(one.nbytes for one in held.values())
