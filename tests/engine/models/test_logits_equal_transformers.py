"""Every family, switch, rope type and dtype: our logits against transformers' on the same checkpoint."""

from __future__ import annotations

import pytest
import torch
from tiny_checkpoints import (
    ARCHITECTURES,
    build_reference,
    logits_of,
    reference_logits,
    reload_reference,
    save_reference,
)

from leadline.engine.models import load_model_config
from leadline.engine.models.loader import load_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.0, 3.0, 8.0],
}
CASES = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_attention_and_mlp_bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_wide_heads": ("llama", {"head_dim": 32}),
    "llama_one_kv_head": ("llama", {"num_key_value_heads": 1}),
    "llama_as_many_kv_heads": ("llama", {"num_key_value_heads": 6}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}),
    "llama_dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama_llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama_yarn": ("llama", {"rope_parameters": YARN}),
    "llama_yarn_attention_factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 0.7}}),
    "llama_yarn_mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}}),
    "llama_yarn_betas_untruncated": (
        "llama",
        {"rope_parameters": {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
    ),
    "mistral": ("mistral", {}),
    "mistral_wide_heads": ("mistral", {"head_dim": 16}),
    "mistral_window": ("mistral", {"sliding_window": 40}),
    "qwen2_window_of_the_last_layer": (
        "qwen2",
        {"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 2},
    ),
    "phi3_window": ("phi3", {"sliding_window": 40}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_tied_with_bias": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "smollm3": ("smollm3", {}),
    "smollm3_layers_named": ("smollm3", {"no_rope_layers": [0, 1, 0], "attention_bias": True}),
    "phi3": ("phi3", {}),
    "phi3_tied_one_kv_head": ("phi3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "phi3_longrope_partial": (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
        },
    ),
    "phi3_longrope_attention_factor": (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "hidden_size": 36,
            "rope_parameters": {**LONGROPE, "attention_factor": 0.7},
        },
    ),
    "ministral": ("ministral", {}),
    "ministral3": ("ministral3", {}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4_all_of_a_head_rotates": ("glm4", {"partial_rotary_factor": 1.0, "attention_bias": False}),
    "granite": ("granite", {}),
    "granite_tied_with_biases": (
        "granite",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "granitemoehybrid": ("granitemoehybrid", {}),
    "granitemoehybrid_unrotated": ("granitemoehybrid", {"position_embedding_type": None}),
    "olmo2": ("olmo2", {}),
    "olmo2_with_biases": ("olmo2", {"attention_bias": True}),
    "olmo3": ("olmo3", {}),
    "olmo3_yarn": ("olmo3", {"rope_scaling": {**YARN}}),
    "exaone4": ("exaone4", {}),
    "exaone4_without_windows": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "seed_oss": ("seed_oss", {}),
    "seed_oss_with_biases": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "gemma2": ("gemma2", {}),
    "gemma2_uncapped": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3_text": ("gemma3_text", {}),
    "gemma3_text_untied_scaled": (
        "gemma3_text",
        {"tie_word_embeddings": False, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral_all_experts": ("mixtral", {"num_local_experts": 2}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe_renormalized_with_plain_layers": (
        "qwen2_moe",
        {"norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe_one_group_no_norms": (
        "glm4_moe",
        {
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": False,
            "attention_bias": True,
            "norm_topk_prob": False,
        },
    ),
    "glm4_moe_two_dense_layers": ("glm4_moe", {"first_k_dense_replace": 2}),
    "minimax_m2": ("minimax_m2", {}),
    "dots1": ("dots1", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe_renormalized": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe_with_plain_layers": ("qwen3_moe", {"mlp_only_layers": [2]}),
    "qwen3_moe_every_second_layer": ("qwen3_moe", {"decoder_sparse_step": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_float32_logits_equal_those_of_transformers(case, tmp_path):
    family, changes = CASES[case]
    reference = build_reference(family, **changes)
    folder = save_reference(reference, tmp_path)
    config = load_model_config(folder)
    model = load_model(folder, config, dtype=torch.float32, device="cpu", progress=False)
    ids = torch.randint(0, config.vocab_size, (200,))
    expected = reference_logits(reference, ids)
    assert expected.std() > 0.5  # the comparison below means something
    torch.testing.assert_close(logits_of(model, ids), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_16_bit_logits_are_close_to_the_float32_ones_of_transformers(family, dtype, tmp_path):
    folder = save_reference(build_reference(family, head_dim=16).to(dtype), tmp_path)
    config = load_model_config(folder)
    assert config.dtype == str(dtype).removeprefix("torch.")
    model = load_model(folder, config, dtype=dtype, device="cpu", progress=False)
    ids = torch.randint(0, config.vocab_size, (64,))
    ours = logits_of(model, ids)
    assert ours.dtype == dtype
    expected = reference_logits(reload_reference(folder, torch.float32), ids)
    theirs = reference_logits(reload_reference(folder, dtype), ids).float()
    error, theirs_error = (ours.float() - expected).abs().mean(), (theirs - expected).abs().mean()
    # As good as transformers in the same precision, give or take the order of roundings.
    assert error < 1.5 * theirs_error
    assert error < 0.03 * expected.std()


def test_a_checkpoint_can_be_loaded_in_another_dtype_than_its_own(tmp_path):
    folder = save_reference(build_reference("llama").to(torch.bfloat16), tmp_path)
    model = load_model(folder, load_model_config(folder), dtype=torch.float32, device="cpu", progress=False)
    ids = torch.arange(50)
    expected = reference_logits(reload_reference(folder, torch.float32), ids)
    torch.testing.assert_close(logits_of(model, ids), expected, atol=2e-4, rtol=1e-4)


def test_a_chunk_of_a_sequence_takes_its_rotation_from_the_positions_given(tmp_path):
    reference = build_reference("qwen3", head_dim=16)
    folder = save_reference(reference, tmp_path)
    model = load_model(folder, load_model_config(folder), dtype=torch.float32, device="cpu", progress=False)
    ids = torch.arange(40)
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend_with_memory(layer, q, k, v):
        if layer in seen:
            k, v = torch.cat((seen[layer][0], k)), torch.cat((seen[layer][1], v))
        seen[layer] = (k, v)
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1))
        future = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
        weights = (scores / q.shape[-1] ** 0.5).masked_fill(future, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(q.shape[1] // v.shape[1], dim=1))

    with torch.inference_mode():
        for part in (slice(0, 17), slice(17, 18), slice(18, 40)):
            hidden = model.forward(ids[part], torch.arange(40)[part], attend_with_memory)
            logits = model.compute_logits(hidden)
    torch.testing.assert_close(logits, reference_logits(reference, ids)[18:], atol=2e-4, rtol=1e-4)


def test_the_model_reports_the_shapes_the_runner_needs(tmp_path):
    folder = save_reference(build_reference("qwen3", head_dim=16), tmp_path)
    model = load_model(folder, load_model_config(folder), dtype=torch.float32, device="cpu", progress=False)
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (3, 6, 2, 16)
    assert (model.vocab_size, model.dtype) == (101, torch.float32)
