"""Tiny random checkpoints written by transformers, the oracle of these tests, and a plain attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from leadline.engine.models.families import FAMILIES

BASE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 6.0,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.4,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "smollm3": {"pad_token_id": 0, "no_rope_layer_interval": 2},
    "phi3": {"pad_token_id": 0},
    "mixtral": {"num_local_experts": 5},
    "ministral": {
        "head_dim": 8,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "glm": {"head_dim": 16, "pad_token_id": 0},
    "glm4": {"head_dim": 16, "pad_token_id": 0},
    "granite": GRANITE,
    "granitemoehybrid": {
        **GRANITE,
        "num_local_experts": 0,
        "mamba_n_heads": 8,
        "shared_intermediate_size": 80,
        "position_embedding_type": "rope",
        "layer_types": ["full_attention"] * 3,
    },
    "olmo2": {"pad_token_id": 0},
    "olmo3": {
        "pad_token_id": 0,
        "sliding_window": 40,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    },
    "exaone4": {"sliding_window": 40, "sliding_window_pattern": 3},
    "seed_oss": {"pad_token_id": 0, "head_dim": 16},
    "gemma2": {
        "pad_token_id": 0,
        "head_dim": 16,
        "sliding_window": 40,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
    },
    "gemma3_text": {
        "pad_token_id": 0,
        "head_dim": 16,
        "sliding_window": 40,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 20,
    },
    "qwen2_moe": {
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
    },
    "glm4_moe": {
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
    },
    "minimax_m2": {"head_dim": 16, "num_local_experts": 7, "num_experts_per_tok": 3, "rotary_dim": 8},
    "dots1": {
        "head_dim": 16,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "qwen3_moe": {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 16},
}

ARCHITECTURES = {family.name: name for name, family in FAMILIES.items()}
"""Name of a family → of its architecture."""


def build_reference(family: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model of `family` with random weights, biases and norm weights included."""
    import transformers

    model_class = getattr(transformers, ARCHITECTURES[family])
    config_class = transformers.CONFIG_MAPPING[family]
    fields = {**BASE, **OF_FAMILY.get(family, {}), **changes}
    torch.manual_seed(seed)
    model = model_class(config_class(**fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0.0, 0.2)
    return model


def save_reference(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def reload_reference(folder: Path, dtype: torch.dtype) -> Any:
    """Read afresh, since .to() would round the rotary frequencies as well, which loading does not."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def attend_whole(model: Any) -> Any:
    """Causal attention over one sequence, as the layers of `model` want it; heads as models/base.py has
    them."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        logits = torch.einsum("qhd,khd->hqk", q, k) * model.attention_scale
        if (cap := model.attention_softcap) is not None:
            logits = cap * torch.tanh(logits / cap)
        seen = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril()
        if (window := model.windows[layer]) is not None:
            seen = seen.triu(1 - window)
        weights = logits.masked_fill(~seen, -torch.inf).softmax(dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.einsum("hqk,khd->qhd", weights, v)

    return attend


@torch.inference_mode()
def logits_of(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Our model's logits at every position of one sequence."""
    positions = torch.arange(len(input_ids))
    return model.compute_logits(model.forward(input_ids, positions, attend_whole(model)))


@torch.inference_mode()
def reference_logits(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids[None]).logits[0]
