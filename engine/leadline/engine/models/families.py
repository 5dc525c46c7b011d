"""What sets the supported architectures apart, as data. Adding a Llama-like family is adding a row here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    window_switch: bool = False
    """sliding_window counts only when use_sliding_window is true, on layers from max_window_layers on."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields that may be absent, as the family's reference implementation has them."""


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", qkv_bias=None, mlp_bias=None),
    "MistralForCausalLM": Family("mistral", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        qkv_bias=True,
        window_switch=True,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        qkv_bias=None,
        qk_norm=True,
        window_switch=True,
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
}
"""Architecture name, as config.json's `architectures` has it → family."""
