"""What sets the supported architectures apart, as data. Adding a Llama-like family is adding a row here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from leadline.engine.models.experts_config import ExpertNames
from leadline.engine.models.layer_config import RotationRule, WindowRule

__all__ = ["FAMILIES", "WRAPPERS", "Family", "TensorNames", "Wrapper"]


@dataclass(slots=True, frozen=True)
class TensorNames:
    """Names in a checkpoint below `model.layers.N`; None: there is no such tensor."""

    before_attention: str | None = "input_layernorm"
    """A norm, as the three that follow."""
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    qkv: str | None = None
    """q, k and v projections in one tensor, not in q_proj, k_proj and v_proj of self_attn."""
    gate_up: str | None = None
    """Gate and up projections in one tensor, not in mlp.gate_proj and mlp.up_proj."""
    down: str = "mlp.down_proj"


_POST_NORMS = TensorNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
_GEMMA_NORMS = TensorNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_GRANITE = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
}


_DEEPSEEK_EXPERTS = ExpertNames(
    counts=("n_routed_experts", "num_local_experts"),
    size="moe_intermediate_size",
    router="mlp.gate",
    experts="mlp.experts",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    scoring="sigmoid",
    bias="mlp.gate.e_score_correction_bias",
    wide_router=True,
    shared="mlp.shared_experts",
    shared_count="n_shared_experts",
    first_dense="first_k_dense_replace",
)
"""As DeepSeek V3 has them."""


@dataclass(slots=True, frozen=True)
class Family:
    """Traits that a family's config.json leaves unsaid. A bias named None is read from the config."""

    name: str
    """model_type"""
    qkv_bias: bool | None = False
    """None: the field attention_bias decides."""
    o_bias: bool | Literal["attention_bias", "attention_out_bias"] = False
    """Or the field that decides."""
    mlp_bias: bool | None = False
    """None: the field mlp_bias decides."""
    head_norms: Literal["none", "head", "whole"] = "none"
    """RMSNorm of queries and keys before they are rotated: of each head, or over all heads of a token."""
    head_norms_field: str | None = None
    """There are any only if this field is true."""
    norm_offset: bool = False
    """Norms multiply by 1 + weight."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the root of hidden_size."""
    windows: WindowRule = field(default_factory=WindowRule)
    rotation: RotationRule = field(default_factory=RotationRule)
    names: TensorNames = field(default_factory=TensorNames)
    intermediate_size: str = "intermediate_size"
    """The field with the width of a plain MLP."""
    experts: ExpertNames | None = None
    """Its MLPs are mixtures of experts."""
    extra_layers: str | None = None
    """The field with how many layers follow the model's own in a checkpoint; they are not loaded."""
    multipliers: frozenset[str] = frozenset()
    """Fields that are read here and refused elsewhere, because they change what is computed: attention_scale
    and the like (config.py)."""
    code: frozenset[str] = frozenset()
    """Classes in auto_map that became this architecture as they are."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields that may be absent, as the family's reference implementation has them."""
    harmless: frozenset[str] = frozenset()
    """Fields of parts that the supported models of the family lack, or of training."""
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields whose other values ask for a part that is not supported."""

    @property
    def fields(self) -> frozenset[str]:
        """Fields of config.json that are read for this family beside those of every one."""
        names = {*self.defaults, *self.multipliers, *self.harmless, *self.required, self.intermediate_size}
        names |= self.windows.fields | self.rotation.fields
        if self.head_norms_field is not None:
            names.add(self.head_norms_field)
        if isinstance(self.o_bias, str):
            names.add(self.o_bias)
        if self.extra_layers is not None:
            names.add(self.extra_layers)
        if self.experts is not None:
            names |= self.experts.fields
        return frozenset(names)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", qkv_bias=None, o_bias="attention_bias", mlp_bias=None),
    "MistralForCausalLM": Family(
        "mistral",
        windows=WindowRule("all"),
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "MinistralForCausalLM": Family(
        "ministral",
        windows=WindowRule("all"),
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "Ministral3ForCausalLM": Family(
        "ministral3",
        windows=WindowRule("all"),
        rotation=RotationRule(scales_queries=True),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
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
        o_bias="attention_bias",
        head_norms="head",
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
        o_bias="attention_bias",
        mlp_bias=None,
        windows=WindowRule("unrotated", switch=True),
        rotation=RotationRule(still="listed"),
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
        rotation=RotationRule(
            types=frozenset({"default", "longrope"}),
            other_names={"su": "longrope", "yarn": "longrope"},
            partial=1.0,
        ),
        names=TensorNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
        code=frozenset({"configuration_phi3.Phi3Config", "modeling_phi3.Phi3ForCausalLM"}),
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
    "GlmForCausalLM": Family(
        "glm",
        qkv_bias=None,
        rotation=RotationRule(partial=0.5, interleaved=True),
        names=TensorNames(gate_up="mlp.gate_up_proj"),
        defaults={
            "attention_bias": True,
            "head_dim": 128,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1.5625e-07,
        },
    ),
    "Glm4ForCausalLM": Family(
        "glm4",
        qkv_bias=None,
        rotation=RotationRule(partial=0.5, interleaved=True),
        names=TensorNames(
            after_attention="post_self_attn_layernorm",
            after_mlp="post_mlp_layernorm",
            gate_up="mlp.gate_up_proj",
        ),
        defaults={
            "attention_bias": True,
            "head_dim": 128,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1.5625e-07,
        },
    ),
    "GraniteForCausalLM": Family(
        "granite",
        qkv_bias=None,
        o_bias="attention_bias",
        mlp_bias=None,
        multipliers=frozenset(_GRANITE),
        defaults=_GRANITE,
    ),
    "GraniteMoeHybridForCausalLM": Family(
        "granitemoehybrid",
        qkv_bias=None,
        o_bias="attention_bias",
        windows=WindowRule(required=True),
        rotation=RotationRule(still="by position_embedding_type"),
        names=TensorNames(gate_up="shared_mlp.input_linear", down="shared_mlp.output_linear"),
        intermediate_size="shared_intermediate_size",
        multipliers=frozenset(_GRANITE),
        defaults={**_GRANITE, "shared_intermediate_size": 1024, "num_local_experts": 8},
        required={"num_local_experts": (0,), "normalization_function": ("rmsnorm", None)},
        harmless=frozenset(
            {
                "intermediate_size",
                "layers_block_type",
                "mamba_chunk_size",
                "mamba_conv_bias",
                "mamba_d_conv",
                "mamba_d_head",
                "mamba_d_state",
                "mamba_expand",
                "mamba_n_groups",
                "mamba_n_heads",
                "mamba_proj_bias",
                "num_experts_per_tok",
                "time_step_limit",
                "init_method",
            }
        ),
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2",
        qkv_bias=None,
        o_bias="attention_bias",
        head_norms="whole",
        names=_POST_NORMS,
        defaults={"rms_norm_eps": 1e-5},
    ),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        qkv_bias=None,
        o_bias="attention_bias",
        head_norms="whole",
        windows=WindowRule("pattern", every=4),
        rotation=RotationRule(by_kind=True, window_theta=500_000.0),
        names=_POST_NORMS,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500_000.0},
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4",
        head_norms="head",
        windows=WindowRule("pattern", every=4, pattern_field=True),
        rotation=RotationRule(still="full layers beside windows"),
        names=_POST_NORMS,
        defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss",
        qkv_bias=None,
        o_bias="attention_out_bias",
        mlp_bias=None,
        defaults={"attention_bias": True, "num_key_value_heads": 8, "head_dim": 128},
        harmless=frozenset({"residual_dropout"}),
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        qkv_bias=None,
        o_bias="attention_bias",
        norm_offset=True,
        scaled_embedding=True,
        windows=WindowRule("pattern", every=2),
        names=_GEMMA_NORMS,
        multipliers=frozenset({"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}),
        defaults={
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
        harmless=frozenset({"cache_implementation"}),
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        qkv_bias=None,
        o_bias="attention_bias",
        head_norms="head",
        norm_offset=True,
        scaled_embedding=True,
        windows=WindowRule("pattern", every=6, pattern_field=True),
        rotation=RotationRule(by_kind=True, window_theta=10_000.0, window_field="rope_local_base_freq"),
        names=_GEMMA_NORMS,
        multipliers=frozenset({"query_pre_attn_scalar", "final_logit_softcapping"}),
        defaults={
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "max_position_embeddings": 131_072,
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1_000_000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
            "vocab_size": 262_208,
        },
        harmless=frozenset({"cache_implementation", "_sliding_window_pattern"}),
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
        o_bias="attention_bias",
        head_norms="head",
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
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        qkv_bias=True,
        experts=ExpertNames(
            counts=("num_experts", "num_local_experts"),
            size="moe_intermediate_size",
            router="mlp.gate",
            experts="mlp.experts",
            gate="gate_proj",
            up="up_proj",
            down="down_proj",
            shared="mlp.shared_expert",
            shared_size="shared_expert_intermediate_size",
            shared_gate="mlp.shared_expert_gate",
        ),
        defaults={
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        required={"use_sliding_window": (False, None)},
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        qkv_bias=None,
        head_norms="head",
        head_norms_field="use_qk_norm",
        rotation=RotationRule(partial=0.5),
        experts=_DEEPSEEK_EXPERTS,
        extra_layers="num_nextn_predict_layers",
        defaults={
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
        },
    ),
    "MiniMaxM2ForCausalLM": Family(
        "minimax_m2",
        head_norms="whole",
        rotation=RotationRule(partial=1.0, dim_field="rotary_dim"),
        experts=ExpertNames(
            counts=("num_local_experts", "num_experts"),
            size="intermediate_size",
            router="block_sparse_moe.gate",
            experts="block_sparse_moe.experts",
            gate="w1",
            up="w3",
            down="w2",
            renormalize=True,
            scoring="sigmoid",
            bias="block_sparse_moe.e_score_correction_bias",
        ),
        code=frozenset(
            {"configuration_minimax_m2.MiniMaxM2Config", "modeling_minimax_m2.MiniMaxM2ForCausalLM"}
        ),
        extra_layers="num_mtp_modules",
        defaults={
            "head_dim": 128,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 8,
            "num_local_experts": 256,
            "rope_theta": 5_000_000.0,
        },
        required={
            "qk_norm_type": ("per_layer", None),
            "scoring_func": ("sigmoid", None),
            "shared_intermediate_size": (0, None),
            "use_routing_bias": (True, None),
        },
        harmless=frozenset(
            {
                "attn_type_list",
                "mlp_intermediate_size",
                "mtp_transformer_layers",
                "shared_moe_mode",
                "use_mtp",
            }
        ),
    ),
    "Dots1ForCausalLM": Family(
        "dots1",
        qkv_bias=None,
        o_bias="attention_bias",
        head_norms="head",
        windows=WindowRule("from max_window_layers"),
        experts=_DEEPSEEK_EXPERTS,
        defaults={"sliding_window": 4096, "max_window_layers": 62},
    ),
}
"""Architecture name, as config.json's `architectures` has it → family."""


@dataclass(slots=True, frozen=True)
class Wrapper:
    """A model of text and images, of which the text half is served."""

    name: str
    """model_type"""
    texts: tuple[str, ...]
    """Architectures that its text half may be; the first where text_config names no model_type."""
    fields: frozenset[str]
    """Beside text_config, of the half that is not served."""
    defaults: Mapping[str, Any] = field(default_factory=dict)


WRAPPERS: dict[str, Wrapper] = {
    "Gemma3ForConditionalGeneration": Wrapper(
        "gemma3",
        texts=("Gemma3ForCausalLM",),
        fields=frozenset(
            {
                "boi_token_index",
                "boi_token_id",
                "eoi_token_index",
                "eoi_token_id",
                "image_token_index",
                "image_token_id",
                "mm_tokens_per_image",
                "vision_config",
            }
        ),
        defaults={"tie_word_embeddings": True},
    ),
    "Mistral3ForConditionalGeneration": Wrapper(
        "mistral3",
        texts=("MistralForCausalLM", "Ministral3ForCausalLM"),
        fields=frozenset(
            {
                "image_token_index",
                "image_token_id",
                "multimodal_projector_bias",
                "projector_hidden_act",
                "spatial_merge_size",
                "vision_config",
                "vision_feature_layer",
            }
        ),
        defaults={"tie_word_embeddings": True},
    ),
}
"""Architecture name → wrapper."""
