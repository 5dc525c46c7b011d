"""Variants of the decoder on a GPU, through CUDA graphs, against the same model on the CPU."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("triton")

from gpu_engine import compare
from gpu_models import SHAPES, write_model
from leadline.engine import LLM, SamplingParams
from leadline.engine.models import load_model_config
from leadline.engine.models.decoder import Decoder

pytestmark = pytest.mark.gpu

WINDOW = 100
GRANITE = {"attention_multiplier": 0.1, "embedding_multiplier": 6.0, "residual_multiplier": 0.4}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 12, "long_factor": [2.0] * 12}
CASES: dict[str, dict[str, Any]] = {
    "Mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": WINDOW},
    "Phi-4-mini": {
        "architectures": ["Phi3ForCausalLM"],
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 256,
        "rope_scaling": LONGROPE,
    },
    "GLM-4": {"architectures": ["Glm4ForCausalLM"]},
    "Granite": {"architectures": ["GraniteForCausalLM"], "logits_scaling": 4.0, **GRANITE},
    "OLMo 3": {"architectures": ["Olmo3ForCausalLM"], "sliding_window": WINDOW, "num_hidden_layers": 4},
    "EXAONE 4": {"architectures": ["Exaone4ForCausalLM"], "sliding_window": WINDOW, "num_hidden_layers": 4},
    "Gemma 2": {
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 40,
        "head_dim": 256,
    },
    "Gemma 3": {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "head_dim": 256,
    },
    "GLM-4.5": {
        "architectures": ["Glm4MoeForCausalLM"],
        "num_hidden_layers": 3,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 80,
        "n_group": 4,
        "topk_group": 2,
    },
    "Qwen2-MoE": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 80,
        "shared_expert_intermediate_size": 96,
    },
}


def write(folder: Path, case: str, dtype: str) -> Path:
    """The tiny shape as `case`, with random weights."""
    shape = {**SHAPES["tiny"], "model_type": None, "hidden_act": None, **CASES[case]}
    if "gemma" not in shape["architectures"][0].lower():
        shape["hidden_act"] = "silu"
    write_model(folder, shape, dtype)
    model = Decoder(load_model_config(folder), dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, slot in model.slots():
        value = torch.randn(slot.shape, generator=generator)
        value = value * 0.1 + 1.0 if "norm" in name else value * slot.shape[-1] ** -0.5
        tensors[name] = value.to(getattr(torch, dtype))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_variant_gives_the_tokens_of_the_cpu(case: str, tmp_path: Path) -> None:
    """Prompts shorter and longer than the window, decoded past it; then again, with prefix hits."""
    folder = write(tmp_path, case, "float32")
    rng = random.Random(1)
    given = [[rng.randrange(12000) for _ in range(n)] for n in (1, 60, 90, 99, 100, 101, 130, 300)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=24, logprobs=8)
    found = {}
    for device in ("cpu", "cuda"):
        with LLM(str(folder), device=device, dtype="float32", progress=False, max_model_len=512) as llm:
            found[device] = [o.outputs[0] for o in llm.generate(given, params, use_tqdm=False)]
            again = [o.outputs[0] for o in llm.generate(given, params, use_tqdm=False)]
        assert compare(found[device], again)["worst_nats"] < 0.01
    difference = compare(found["cpu"], found["cuda"])
    assert difference["worst_nats"] < 0.01, difference
    assert difference["worst_gap"] < 0.01, difference
    assert difference["sequences_equal"] >= 7, difference


@pytest.mark.parametrize("case", ["Gemma 3", "OLMo 3", "GLM-4", "Mistral"])
def test_a_variant_in_16_bits_and_with_an_fp8_cache_stays_near_float32(case: str, tmp_path: Path) -> None:
    folder = write(tmp_path, case, "bfloat16")
    rng = random.Random(2)
    given = [[rng.randrange(12000) for _ in range(n)] for n in (5, 60, 130, 300)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=12, logprobs=8)
    found = []
    for settings in (
        {"device": "cpu", "dtype": "float32"},
        {"device": "cuda", "dtype": "bfloat16"},
        {"device": "cuda", "dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    ):
        with LLM(str(folder), progress=False, max_model_len=512, **settings) as llm:
            found.append([o.outputs[0] for o in llm.generate(given, params, use_tqdm=False)])
    for other, bound in zip(found[1:], (0.05, 0.25), strict=True):
        assert compare(found[0], other)["mean_nats"] < bound
