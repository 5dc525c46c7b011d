"""What sets the supported architectures apart, as data. Adding a Llama-like family is adding a row here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from leadline.engine.models.experts_config import ExpertNames
from leadline.engine.models.layer_config import WindowRule

__all__ = ["FAMILIES", "Family"]


@dataclass(slots=True, frozen=True)
class Family:
    """Traits that a family's config.json leaves unsaid. A bias named None is read from the config."""

    name: str
    qkv_bias: bool | None = False
    """None: the field attention_bias decides, and o_proj follows it."""
    mlp_bias: bool | None = False
    """None: the field mlp_bias decides."""
    qk_norm: bool = False
    """RMSNorm over each query and key head before the rotary embedding."""
    windows: WindowRule = field(default_factory=WindowRule)
    unrotated: bool = False
    """no_rope_layers has a 0 for each layer without a rotary embedding; without it, every
    no_rope_layer_interval-th is one."""
    merged: bool = False
    """Checkpoints have qkv_proj and gate_up_proj, each one tensor."""
    experts: ExpertNames | None = None
    """Its MLPs are mixtures of experts."""
    plain_rope: bool = False
    """The reference implementation knows no rope scaling but longrope, and takes other names for it."""
    code: frozenset[str] = frozenset()
    """Classes in auto_map that became this architecture as they are."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields that may be absent, as the family's reference implementation has them."""

    @property
    def fields(self) -> frozenset[str]:
        """Fields of config.json that are read for this family beside those of every one."""
        names = set(self.defaults)
        if self.unrotated:
            names |= {"no_rope_layers", "no_rope_layer_interval"}
        if self.experts is not None:
            names |= {*self.experts.counts, self.experts.size, "num_experts_per_tok"}
            names |= {"mlp_only_layers", "decoder_sparse_step", "norm_topk_prob"}
        return frozenset(names)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", qkv_bias=None, mlp_bias=None),
    "MistralForCausalLM": Family(
        "mistral",
        windows=WindowRule("all"),
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        qkv_bias=True,
        windows=WindowRule("from max_window_layers", switch=True),
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        qkv_bias=None,
        qk_norm=True,
        windows=WindowRule("from max_window_layers", switch=True),
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        qkv_bias=None,
        mlp_bias=None,
        windows=WindowRule("unrotated", switch=True),
        unrotated=True,
        defaults={
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
            "rope_theta": 2_000_000.0,
        },
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        windows=WindowRule("all"),
        merged=True,
        plain_rope=True,
        code=frozenset({"configuration_phi3.Phi3Config", "modeling_phi3.Phi3ForCausalLM"}),
        defaults={"rms_norm_eps": 1e-5},
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        windows=WindowRule("all"),
        experts=ExpertNames(
            counts=("num_local_experts",),
            size="intermediate_size",
            router="block_sparse_moe.gate",
            experts="block_sparse_moe.experts",
            gate="w1",
            up="w3",
            down="w2",
            renormalize=True,
        ),
        defaults={
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
        },
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        qkv_bias=None,
        qk_norm=True,
        windows=WindowRule("all", switch=True),
        experts=ExpertNames(
            counts=("num_experts", "num_local_experts"),
            size="moe_intermediate_size",
            router="mlp.gate",
            experts="mlp.experts",
            gate="gate_proj",
            up="up_proj",
            down="down_proj",
        ),
        defaults={
            "num_key_value_heads": 4,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "sliding_window": 4096,
        },
    ),
}
"""Architecture name, as config.json's `architectures` has it → family."""
