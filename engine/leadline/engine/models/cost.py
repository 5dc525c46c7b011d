"""What a model's parts cost relative to each other, from its shape alone."""

from __future__ import annotations

from leadline.engine.models.config import ModelConfig

__all__ = ["active_weights", "attention_work"]

_SLOWER = 1.4
"""Attention reaches a smaller share of the arithmetic peak than matrix products do (H200: 560 and 790
TFLOP/s, benchmarks/RESULTS.md)."""


def attention_work(config: ModelConfig) -> float:
    """The cost of attending to one key in all layers, relative to the matrix products of one token."""
    # Two operations a weight, and two for each of q·k and p·v a number of a head.
    attended = config.num_heads * config.head_dim
    return _SLOWER * 4 * attended * config.num_layers / (2 * active_weights(config))


def active_weights(config: ModelConfig) -> int:
    """Weights of all layers that one token is multiplied with; embedding and head not counted."""
    attended = config.num_heads * config.head_dim
    projected = config.hidden_size * (2 * attended + 2 * config.num_kv_heads * config.head_dim)
    dense = 3 * config.hidden_size * config.intermediate_size
    mlps = config.num_layers * dense
    if config.experts is not None:
        experts = config.experts
        width = experts.intermediate_size * experts.per_token + experts.shared_size
        sparse = 3 * config.hidden_size * width
        mlps = dense * len(experts.dense_layers) + sparse * (config.num_layers - len(experts.dense_layers))
    return config.num_layers * projected + mlps
