"""Fields of config.json that nothing here reads: refused, harmless or unknown.

A field that would change what the model computes is refused by its name. transformers ignores most of the
refused ones for these architectures, because the code that honours them lives in the model's repository or in
another engine; a model that was trained with them would then answer, and wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from leadline.engine.errors import UnsupportedModel
from leadline.engine.models.families import Family
from leadline.engine.models.rope_config import ROPE_FIELDS

__all__ = ["REFUSED", "refuse_unread", "unknown_fields"]

_OFF = (False, 0, "", [], {})

REFUSED: dict[str, tuple[Any, ...]] = {
    # attention
    "is_causal": (True,),
    "bidirectional": _OFF,
    "use_bidirectional_attention": _OFF,
    "dual_chunk_attention_config": _OFF,
    "attention_chunk_size": _OFF,
    "add_cross_attention": _OFF,
    "is_encoder_decoder": _OFF,
    "alibi": _OFF,
    "use_alibi": _OFF,
    "use_rope": (True,),
    "rope_interleave": _OFF,
    "rope_interleaved": _OFF,
    "qk_norm": _OFF,
    "use_qk_norm": _OFF,
    "qk_layernorm": _OFF,
    "clip_qkv": _OFF,
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": _OFF,
    "kv_lora_rank": _OFF,
    "pruned_heads": _OFF,
    "per_layer_config": _OFF,
    # scales
    "final_logit_softcapping": _OFF,
    "logits_soft_cap": _OFF,
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "dim_model_base": (),
    # layers
    "parallel_attn": _OFF,
    "parallel_residual": _OFF,
    "use_parallel_residual": _OFF,
    "n_shared_experts": _OFF,
    "num_shared_experts": _OFF,
    "shared_expert_intermediate_size": _OFF,
    "scoring_func": ("softmax",),
    "routed_scaling_factor": (1,),
    "n_group": (*_OFF, 1),
    # weights in another form
    "quantization": _OFF,
}
"""Field → values that ask for nothing. null never does."""

_READ = frozenset(
    {
        "architectures",
        "attention_bias",
        "auto_map",
        "bos_token_id",
        "compression_config",
        "dtype",
        "eos_token_id",
        "head_dim",
        "hidden_act",
        "hidden_activation",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "mlp_bias",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "quantization_config",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "torch_dtype",
        "vocab_size",
    }
)
"""Of every family; others are in `families.Family.fields`."""

_HARMLESS = frozenset(
    {
        # of training
        "attention_dropout",
        "attn_pdrop",
        "classifier_dropout",
        "embd_pdrop",
        "gradient_checkpointing",
        "hidden_dropout",
        "initializer_range",
        "output_router_logits",
        "resid_pdrop",
        "router_aux_loss_coef",
        "router_jitter_noise",
        # of other programs, and of how a computation is split
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_flash_attn_2_enabled",
        "_name_or_path",
        "attn_implementation",
        "chunk_size_feed_forward",
        "gguf",
        "name_or_path",
        "pretraining_tp",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
        "use_flash_attn",
        # of other tasks
        "finetuning_task",
        "id2label",
        "is_decoder",
        "is_llama_config",
        "keys_to_ignore_at_inference",
        "label2id",
        "max_length",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "problem_type",
        "return_dict",
        "task_specific_params",
        "tie_encoder_decoder",
        "torchscript",
        # of generation, in configs of old
        "do_sample",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
        # of the tokenizer
        "decoder_start_token_id",
        "pad_token_id",
        "sep_token_id",
        "tokenizer_class",
        "unk_token_id",
        "user_defined_symbols",
        "model_max_length",
        # of windows, where the family has no switch for them
        "max_window_layers",
        "use_sliding_window",
        # of tensors, which say it themselves, and of positions in images
        "qkv_bias",
        "use_mrope",
    }
)


_QK_NORM = ("qk_norm", "use_qk_norm", "qk_layernorm")


def refuse_unread(raw: Mapping[str, Any], family: Family) -> None:
    """Raise UnsupportedModel for the first field that changes the computation and that we do not honour."""
    for name, neutral in REFUSED.items():
        value = raw.get(name)
        if value is None or value in neutral or name in family.fields:
            continue
        if value is True and family.head_norms != "none" and name in _QK_NORM:
            continue
        if name == "quantization":
            raise UnsupportedModel(
                f"config.json: quantization {_shown(value)} is not supported; use a checkpoint that is not "
                "quantized, or one with a quantization_config (docs/models.md)"
            )
        raise UnsupportedModel(
            f"config.json: {name} is {_shown(value)}, which changes what the model computes and is not "
            "supported"
        )
    for name, supported in family.required.items():
        if (value := raw.get(name, family.defaults.get(name))) not in supported:
            raise UnsupportedModel(
                f"config.json: {name} is {_shown(value)}, which is not supported; "
                f"{' or '.join(map(repr, supported))} is"
            )
    _refuse_code(raw.get("auto_map"), family.code)


def _refuse_code(auto_map: object, known: frozenset[str]) -> None:
    if auto_map is None or auto_map == {}:
        return
    if not isinstance(auto_map, dict):
        raise UnsupportedModel(f"config.json: auto_map must be an object, not {_shown(auto_map)}")
    for name, code in auto_map.items():
        # A copy names the repository that it takes the code from: org/name--file.Class.
        classes = {str(one).rpartition("--")[2] for one in (code if isinstance(code, list) else [code])}
        if name.startswith(("AutoModel", "AutoConfig")) and not classes <= known:
            raise UnsupportedModel(
                f"config.json: auto_map gives {name} to code of the repository ({_shown(code)}), which is "
                "never run; if the model is a plain one of its architecture, serve a copy without auto_map"
            )


def unknown_fields(raw: Mapping[str, Any], read: Iterable[str]) -> tuple[str, ...]:
    """Names of the fields that are set and that are not known here, in order. `read`: those of the family."""
    known = _READ | _HARMLESS | REFUSED.keys() | set(read)
    names = [name for name, value in raw.items() if value is not None and name not in known]
    for rope in ("rope_parameters", "rope_scaling"):
        inner = raw.get(rope)
        for name, value in inner.items() if isinstance(inner, dict) else ():
            if isinstance(value, dict):  # of one layer type
                names += [f"{rope}.{name}.{one}" for one in value if one not in ROPE_FIELDS]
            elif name not in ROPE_FIELDS:
                names.append(f"{rope}.{name}")
    return tuple(sorted(names))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
