"""config.json and generation_config.json: what is read, and what is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tiny_checkpoints import BASE

from leadline.engine.config import EngineConfig
from leadline.engine.errors import ModelNotFound, UnsupportedModel
from leadline.engine.models import load_model_config
from leadline.engine.models.families import FAMILIES, WRAPPERS
from leadline.engine.models.unread_fields import REFUSED
from leadline.engine.runner.shard import resolve_context

LLAMA = {**BASE, "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rope_theta": 10000.0}


def write(folder, config, generation=None):
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def qwen2(**changes):
    return {**BASE, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 128, **changes}


def moe(**changes):
    shape = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return {**BASE, "architectures": ["Qwen3MoeForCausalLM"], **shape, **changes}


def phi3(**changes):
    return {**BASE, "architectures": ["Phi3ForCausalLM"], **changes}


LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"type": "yarn", "factor": 4.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def granite(**changes):
    return {**BASE, "architectures": ["GraniteForCausalLM"], **changes}


def hybrid(**changes):
    shape = {"num_local_experts": 0, "layer_types": ["attention"] * 3}
    return {**BASE, "architectures": ["GraniteMoeHybridForCausalLM"], **shape, **changes}


def glm4_moe(**changes):
    shape = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    return {**BASE, "architectures": ["Glm4MoeForCausalLM"], **shape, **changes}


def gemma3(**changes):
    return {**BASE, "architectures": ["Gemma3ForCausalLM"], **changes}


def wrapped(**changes):
    text = {**BASE, "model_type": "mistral", "sliding_window": None}
    return {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text, **changes}


def mistral(**changes):
    return {**BASE, "architectures": ["MistralForCausalLM"], **changes}


def smollm3(**changes):
    return {**BASE, "num_hidden_layers": 5, "architectures": ["SmolLM3ForCausalLM"], **changes}


def test_shapes_are_read(tmp_path):
    config = load_model_config(write(tmp_path, LLAMA))
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (101, 48, 80)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 6, 2, 8)
    assert config.rms_norm_eps == 1e-5
    assert config.max_model_len == 256
    assert not config.tie_word_embeddings


def test_an_absent_num_key_value_heads_means_as_many_as_heads(tmp_path):
    fields = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert load_model_config(write(tmp_path, fields)).num_kv_heads == 6


@pytest.mark.parametrize(
    ("changes", "biases"),
    [
        (LLAMA, (False, False, False)),
        ({**LLAMA, "attention_bias": True}, (True, True, False)),
        ({**LLAMA, "mlp_bias": True}, (False, False, True)),
        (qwen2(), (True, False, False)),
        ({**BASE, "architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, (True, True, False)),
        ({**BASE, "architectures": ["Qwen3ForCausalLM"]}, (False, False, False)),
    ],
)
def test_biases_follow_the_family_and_the_config(changes, biases, tmp_path):
    config = load_model_config(write(tmp_path, changes))
    assert (config.attention_bias, config.o_bias, config.mlp_bias) == biases


def test_a_qwen3_without_head_dim_has_128(tmp_path):
    config = load_model_config(write(tmp_path, {**BASE, "architectures": ["Qwen3ForCausalLM"]}))
    assert config.head_dim == 128
    assert config.head_norms == "head"


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (2, [7, 2, 9], (7, 2, 9)),
        (None, 5, (5,)),
        (0, 3, (3, 0)),
        (None, None, ()),
    ],
)
def test_every_eos_id_of_both_files_counts(in_config, in_generation, expected, tmp_path):
    write(tmp_path, {**LLAMA, "eos_token_id": in_config}, {"eos_token_id": in_generation})
    assert load_model_config(tmp_path).eos_token_ids == expected


def test_eos_ids_beyond_the_vocabulary_are_left_out(tmp_path):
    write(tmp_path, {**LLAMA, "eos_token_id": -1}, {"eos_token_id": [101, 5]})
    assert load_model_config(tmp_path).eos_token_ids == (5,)


def test_an_eos_id_of_another_type_is_refused(tmp_path):
    with pytest.raises(UnsupportedModel, match=r"generation_config\.json: eos_token_id .*\[\[2\]\]"):
        load_model_config(write(tmp_path, LLAMA, {"eos_token_id": [[2]]}))


def test_generation_defaults_are_exposed(tmp_path):
    write(tmp_path, LLAMA, {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05})
    defaults = load_model_config(tmp_path).generation
    assert (defaults.do_sample, defaults.temperature, defaults.top_k) == (True, 0.6, 20)
    assert defaults.repetition_penalty == 1.05
    assert defaults.top_p is None


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_checkpoints_dtype_is_read_in_both_spellings(name, tmp_path):
    assert load_model_config(write(tmp_path, {**LLAMA, name: "bfloat16"})).dtype == "bfloat16"


def test_yarn_reaches_beyond_a_max_position_embeddings_left_at_the_original_length(tmp_path):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert load_model_config(write(tmp_path, qwen2(rope_scaling=scaling))).max_model_len == 1024


def test_dynamic_ends_where_its_frequencies_would_change(tmp_path):
    scaling = {"type": "dynamic", "factor": 4.0}
    assert load_model_config(write(tmp_path, {**LLAMA, "rope_scaling": scaling})).max_model_len == 256


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({**LLAMA, "architectures": ["GPT2LMHeadModel"]}, "architectures.*LlamaForCausalLM, Mistral"),
        ({**LLAMA, "architectures": ["XForCausalLM"], "auto_map": {"AutoModel": "x.X"}}, "auto_map"),
        ({**LLAMA, "architectures": None}, "architectures"),
        ({**LLAMA, "architectures": 5}, "architectures must be a list of names"),
        ({**LLAMA, "eos_token_id": "abc"}, "config.json: eos_token_id must be a token id"),
        ({**LLAMA, "rms_norm_eps": "small"}, "rms_norm_eps must be a positive number"),
        (
            {**LLAMA, "quantization_config": {"quant_method": "aqlm"}},
            "quantization_config.quant_method",
        ),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({**LLAMA, "rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_scaling.*'longrope'"),
        ({**LLAMA, "rope_parameters": {"rope_type": "su"}}, "rope_parameters.*'su'"),
        ({**LLAMA, "rope_scaling": {"type": "linear"}}, "rope_scaling.*lacks factor"),
        ({**LLAMA, "rope_scaling": {"type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
        (
            {**LLAMA, "rope_scaling": {"type": "linear", "factor": "two"}},
            "rope_scaling.factor must be a positive number",
        ),
        ({**LLAMA, "rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({**LLAMA, "rope_scaling": {"type": ["linear"]}}, r"rope_scaling has rope_type \['linear'\]"),
        (
            {**LLAMA, "rope_scaling": {"type": "linear", "factor": 0}},
            "factor must be a positive number, not 0",
        ),
        ({**LLAMA, "rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "high_freq_factor must be above low"),
        ({**LLAMA, "rope_scaling": {**YARN, "beta_slow": 0}}, "beta_slow must be a positive number, not 0"),
        ({**LLAMA, "rope_scaling": {**YARN, "factor": 1e20}}, "factor 1e.20 makes a context .* beyond any"),
        (
            {**LLAMA, "rope_scaling": {**YARN, "original_max_position_embeddings": 0}},
            "original_max_position_embeddings must be a positive number, not 0",
        ),
        (
            {**LLAMA, "rope_scaling": {**YARN, "original_max_position_embeddings": 0.5}},
            "original_max_position_embeddings 0.5 is no length",
        ),
        (phi3(rope_scaling=LONGROPE, original_max_position_embeddings=1), "'longrope' must be 2 or more"),
        (
            phi3(rope_scaling=LONGROPE | {"long_factor": [1.0, 0.0, 1.0, 1.0]}),
            r"long_factor\[1\] must be a pos",
        ),
        ({**LLAMA, "rope_theta": 0}, "rope_theta must be a positive number, not 0"),
        ({**LLAMA, "rope_theta": 0.5}, "rope_theta must be above 1, not 0.5"),
        ({**LLAMA, "partial_rotary_factor": float("nan")}, "partial_rotary_factor must be .* not nan"),
        ({**LLAMA, "max_position_embeddings": "256"}, "max_position_embeddings must be a positive integer"),
        ({**LLAMA, "rms_norm_eps": float("inf")}, "rms_norm_eps must be a positive number, not inf"),
        ({**LLAMA, "rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "by layer type"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({**LLAMA, "torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        ({**LLAMA, "hidden_size": None}, "lacks hidden_size"),
        ({**LLAMA, "num_hidden_layers": "3"}, "num_hidden_layers must be a positive integer"),
        ({**LLAMA, "num_attention_heads": 5}, "hidden_size 48 is no multiple"),
        ({**LLAMA, "num_key_value_heads": 4}, "num_attention_heads 6 is no multiple"),
        ({**LLAMA, "head_dim": 7}, "head_dim 7 is odd"),
        ({**LLAMA, "layer_types": ["linear_attention"] * 3}, "layer_types"),
        (mistral(sliding_window="4096"), "sliding_window must be a positive integer, not '4096'"),
        (qwen2(use_sliding_window=True, max_window_layers="2"), "max_window_layers must be a positive"),
        ({**LLAMA, "layer_types": [["full_attention"]]}, "layer_types must be a list of names"),
        ({**LLAMA, "layer_types": "full_attention"}, "layer_types must be a list of names"),
        ({**LLAMA, "layer_types": ["full_attention"] * 2}, "layer_types has 2 entries for 3 layers"),
        ({**LLAMA, "is_causal": False}, "is_causal is False"),
        (qwen2(dual_chunk_attention_config={"chunk_size": 262144}), "dual_chunk_attention_config"),
        ({**LLAMA, "auto_map": {"AutoModelForCausalLM": "mine.LlamaForCausalLM"}}, "auto_map gives AutoM"),
        ({**LLAMA, "auto_map": {"AutoConfig": ["mine.Config"]}}, "auto_map gives AutoConfig"),
        ({**LLAMA, "auto_map": "mine"}, "auto_map must be an object"),
        ({**LLAMA, "quantization": {"group_size": 64, "bits": 4}}, "quantization {'group_size': 64"),
        ({**LLAMA, "compression_config": {"quant_method": "sparseml"}}, "compression_config.quant_method"),
        ({**LLAMA, "per_layer_config": {"0": {"num_key_value_heads": 1}}}, "per_layer_config"),
        ({**LLAMA, "use_qk_norm": True}, "use_qk_norm is True"),
        ({**LLAMA, "final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({**LLAMA, "embedding_multiplier": 12}, "embedding_multiplier is 12"),
        ({**LLAMA, "model_type": "mistral"}, "model_type 'mistral' contradicts .* LlamaForCausalLM"),
        ({**LLAMA, "tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({**LLAMA, "attention_bias": 1}, "attention_bias must be true or false, not 1"),
        (phi3(rope_scaling={"type": "linear", "factor": 4.0}), "rope_type 'linear' .* default and longrope"),
        (phi3(rope_scaling={"type": "su", "short_factor": [1.0] * 4}), "'longrope' lacks long_factor"),
        (phi3(rope_scaling=LONGROPE | {"long_factor": [1.0, 2.0]}), "long_factor must be 4 numbers"),
        (phi3(rope_scaling=LONGROPE | {"short_factor": "1"}), "short_factor must be 4 numbers"),
        (phi3(partial_rotary_factor=0.1), "partial_rotary_factor 0.1 is not supported with head_dim 8"),
        (granite(residual_multiplier=0), "residual_multiplier must be a positive number, not 0"),
        (hybrid(layer_types=["mamba", "attention", "mamba"]), r"layer_types has \['mamba'\]"),
        (hybrid(num_local_experts=None), "num_local_experts is None, which is not supported; 0 is"),
        (hybrid(num_local_experts=62), "num_local_experts is 62, which is not supported; 0 is"),
        (hybrid(layer_types=None), "lacks layer_types"),
        (hybrid(normalization_function="layernorm"), "normalization_function is 'layernorm', which is not"),
        (glm4_moe(n_group=3), "3 experts of the best 1 of 3 groups .* cannot be chosen among 8"),
        (glm4_moe(n_group=8, topk_group=2), "3 experts of the best 2 of 8 groups"),
        (glm4_moe(n_group=4, topk_group=1), "3 experts of the best 1 of 4 groups"),
        (glm4_moe(routed_scaling_factor="2"), "routed_scaling_factor must be a positive number, not '2'"),
        (glm4_moe(first_k_dense_replace="1"), "first_k_dense_replace must be a positive integer"),
        (moe(routed_scaling_factor=2.5), "routed_scaling_factor is 2.5"),
        (
            {**moe(qk_norm_type="per_head"), "architectures": ["MiniMaxM2ForCausalLM"]},
            "qk_norm_type is 'per_head', which is not supported; 'per_layer' or None is",
        ),
        (moe(n_shared_experts=1), "n_shared_experts is 1"),
        (
            {**moe(use_sliding_window=True), "architectures": ["Qwen2MoeForCausalLM"]},
            "use_sliding_window is True, which is not supported",
        ),
        (gemma3(use_bidirectional_attention=True), "use_bidirectional_attention is True"),
        (gemma3(attn_logit_softcapping=50.0), "attn_logit_softcapping is 50.0"),
        (gemma3(rope_parameters={"rope_type": "default"}), "rope_parameters must be an object with full_att"),
        (gemma3(hidden_activation="gelu"), "hidden_activation 'gelu' is not supported"),
        (moe(hidden_act="gelu_pytorch_tanh"), "hidden_act 'gelu_pytorch_tanh' is not supported; silu is$"),
        (wrapped(text_config=None), "text_config must be an object, not None"),
        (wrapped(text_config={"model_type": ["llama"]}), r"text_config.model_type \['llama'\] is not sup"),
        (wrapped(text_config={"model_type": "llama"}), "text_config.model_type 'llama' is not supported"),
        (wrapped(model_type="gemma3"), "model_type 'gemma3' contradicts .* which is 'mistral3'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config, field, tmp_path):
    with pytest.raises(UnsupportedModel, match=field):
        load_model_config(write(tmp_path, config))


MIXED = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({**LLAMA, "layer_types": MIXED, "sliding_window": 64}, [None, 64, None]),
        (mistral(sliding_window=128), [128] * 3),
        (mistral(sliding_window=128, layer_types=MIXED), [None, 128, None]),
        (mistral(max_position_embeddings=8192), [4096] * 3),
        (mistral(sliding_window=None), [None] * 3),
        (qwen2(use_sliding_window=True, max_window_layers=2), [None, None, 128]),
        (qwen2(use_sliding_window=True, layer_types=MIXED), [None, 128, None]),
        (qwen2(use_sliding_window=False), [None] * 3),
        (qwen2(use_sliding_window=True, max_window_layers=3), [None] * 3),
        (qwen2(use_sliding_window=True, layer_types=["full_attention"] * 3), [None] * 3),
        (qwen2(use_sliding_window=True, max_window_layers=0, sliding_window=4096), [4096] * 3),
        (moe(use_sliding_window=True, sliding_window=64), [64] * 3),
        (moe(use_sliding_window=True, sliding_window=64, max_window_layers=3), [64] * 3),
        (phi3(sliding_window=200), [200] * 3),
        (smollm3(use_sliding_window=True, sliding_window=32), [None, None, None, 32, None]),
    ],
)
def test_the_sliding_window_of_layers_is_read(config, windows, tmp_path):
    layers = load_model_config(write(tmp_path, config)).layers
    assert [layer.window for layer in layers] == windows


def test_a_window_does_not_bound_the_context(tmp_path):
    model = load_model_config(write(tmp_path, mistral(sliding_window=128)))
    assert resolve_context(EngineConfig(str(tmp_path)), model) == 256


@pytest.mark.parametrize(
    "harmless",
    [
        {
            "is_causal": True,
            "quantization_config": {},
            "dual_chunk_attention_config": None,
            "logit_scale": 1.0,
        },
        {"auto_map": {"AutoTokenizer": ["tok.Tokenizer", None]}},
        {"pretraining_tp": 1, "use_cache": True, "attention_dropout": 0.0, "transformers_version": "4.40.0"},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "model_type": "llama"},
    ],
)
def test_fields_that_ask_for_nothing_are_neither_refused_nor_told(harmless, tmp_path):
    assert load_model_config(write(tmp_path, {**LLAMA, **harmless})).unknown_fields == ()


def test_the_code_that_became_an_architecture_may_be_named(tmp_path):
    code = {
        "AutoConfig": "org/name--configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    }
    assert load_model_config(write(tmp_path, phi3(auto_map=code))).family == "phi3"


def test_a_field_may_ask_for_what_the_family_has(tmp_path):
    coder = {"use_qk_norm": True, "shared_expert_intermediate_size": 0, "qkv_bias": False}
    assert load_model_config(write(tmp_path, moe(**coder))).unknown_fields == ()


def test_unknown_fields_are_listed(tmp_path):
    odd = {"zeta": 1, "alpha": [2], "nothing": None, "rope_parameters": {"rope_type": "default", "twist": 3}}
    config = load_model_config(write(tmp_path, {**LLAMA, **odd}))
    assert config.unknown_fields == ("alpha", "rope_parameters.twist", "zeta")
    assert load_model_config(write(tmp_path, {**LLAMA, "num_experts": 8})).unknown_fields == ("num_experts",)
    assert load_model_config(write(tmp_path, moe())).unknown_fields == ()


def test_a_folder_without_config_is_no_model(tmp_path):
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        load_model_config(tmp_path)


def test_a_broken_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelNotFound, match=r"config\.json cannot be read"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**LLAMA, "vocab_size": 10**30}, "vocab_size 10{30}"),
        ({**LLAMA, "num_hidden_layers": 2 * 10**9}, "num_hidden_layers 20{9}"),
        (glm4_moe(num_nextn_predict_layers=2 * 10**9), "num_nextn_predict_layers 20{9}"),
    ],
)
def test_a_size_beyond_any_model_is_refused_by_name(changes, message, tmp_path):
    with pytest.raises(UnsupportedModel, match=rf"config\.json: {message} is beyond any model's"):
        load_model_config(write(tmp_path, changes))


def test_a_config_nested_too_deeply_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(ModelNotFound, match=r"config\.json cannot be read: its values are nested too deeply"):
        load_model_config(tmp_path)


def test_experts_are_read(tmp_path):
    fields = moe(num_hidden_layers=6, mlp_only_layers=[1], decoder_sparse_step=3, norm_topk_prob=True)
    experts = load_model_config(write(tmp_path, fields)).experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.intermediate_size) == (8, 2, 24)
    assert experts.renormalize
    assert experts.dense_layers == {0, 1, 3, 4}
    assert load_model_config(write(tmp_path, LLAMA)).experts is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts must be a positive integer, not 0"),
        ({"num_experts": None}, "num_experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_experts 8"),
        ({"num_experts_per_tok": "2"}, "num_experts_per_tok must be a positive integer, not '2'"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size must be a positive integer, not -1"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers must be a list of layers, not '0'"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer, not 0"),
    ],
)
def test_experts_that_make_no_sense_are_refused_by_name(changes, message, tmp_path):
    with pytest.raises(UnsupportedModel, match=f"config.json(: | lacks ){message}"):
        load_model_config(write(tmp_path, moe(**changes)))


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, {3}),
        ({"no_rope_layer_interval": 2}, {1, 3}),
        ({"no_rope_layers": [1, 1, 0, 1, 0]}, {2, 4}),
        ({"no_rope_layers": [1] * 5}, set()),
    ],
)
def test_layers_without_rotation_are_read(changes, layers, tmp_path):
    def unrotated(config):
        found = load_model_config(write(tmp_path, config)).layers
        return {index for index, layer in enumerate(found) if layer.rope is None}

    assert unrotated(smollm3(**changes)) == layers
    assert unrotated({**LLAMA, **changes}) == set()


@pytest.mark.parametrize("value", [[1, 1], [1, 1, 1, 1, 2], "11101"])
def test_layers_without_rotation_that_make_no_sense_are_refused(value, tmp_path):
    with pytest.raises(UnsupportedModel, match="no_rope_layers must be a 0 or a 1 for each of 5 layers"):
        load_model_config(write(tmp_path, smollm3(no_rope_layers=value)))


def test_layers_of_gemma_3_differ_in_window_and_theta(tmp_path):
    old = gemma3(num_hidden_layers=7, sliding_window=512, rope_local_base_freq=9e3, rope_scaling=None)
    old["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 9e3},
    }
    new = gemma3(num_hidden_layers=7, sliding_window=512, rope_parameters=nested)
    for spelling in (old, new):
        layers = load_model_config(write(tmp_path, spelling)).layers
        assert [layer.window for layer in layers] == [512] * 5 + [None, 512]
        assert [(layer.rope.theta, layer.rope.factor) for layer in layers[4:]] == [
            (9e3, 1),
            (1e6, 8),
            (9e3, 1),
        ]


def test_the_text_half_of_a_model_of_images_is_read(tmp_path):
    config = wrapped(
        vision_config={"model_type": "pixtral"}, spatial_merge_size=2, torch_dtype="bfloat16", eos_token_id=7
    )
    read = load_model_config(write(tmp_path, config))
    assert (read.architecture, read.family, read.wrapped) == (config["architectures"][0], "mistral", True)
    assert (read.dtype, read.eos_token_ids, read.unknown_fields) == ("bfloat16", (7,), ())
    assert load_model_config(write(tmp_path, wrapped(odd=1))).unknown_fields == ("odd",)


def test_fields_of_gemma_3_that_its_text_half_leaves_out_have_defaults(tmp_path):
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    read = load_model_config(write(tmp_path, config))
    assert (read.num_heads, read.num_kv_heads, read.head_dim, read.vocab_size) == (8, 4, 256, 262_208)
    assert read.tie_word_embeddings
    assert read.attention_scale == 1 / 16


def test_the_page_of_models_lists_the_architectures_that_are_supported():
    page = Path(__file__).parents[3] / "docs" / "models.md"
    listed = re.findall(r"^\| `(\w+)` \|", page.read_text(), re.MULTILINE)
    supported = [*FAMILIES, *WRAPPERS]
    assert [name for name in listed if name.endswith(("LM", "Generation"))] == supported


def test_the_page_of_models_lists_the_fields_that_are_refused():
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    section = page.split("## Fields that are refused")[1].split("\n## ")[0].split("reads the field:")[1]
    assert re.findall(r"`(\w+)`", section) == list(REFUSED)
