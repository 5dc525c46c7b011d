"""How much memory a model takes, from its shape alone: weights, KV cache, the largest step.

Pure arithmetic, no torch. `leadline size` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass

from leadline.engine.models.config import ModelConfig
from leadline.engine.models.encoder_config import EncoderConfig
from leadline.engine.models.quantized_config import QuantizedConfig

__all__ = ["GPUS", "ModelSize", "encoder_size", "model_size"]

GPUS = {
    "h200": 143_771,
    "h100": 81_559,
    "h100-nvl": 95_830,
    "b200": 183_359,
}
"""Memory in MiB, as nvidia-smi shows it, of GPUs that the engine runs on (runner/shard.py)."""

_OUTSIDE = 3_300_000_000
"""Bytes of a GPU that hold neither weights, activations nor KV cache: CUDA's context, graphs, workspaces. The
difference on one H200 (benchmarks/RESULTS.md, KV pool of Qwen3-8B)."""
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Bytes on each GPU.

    Attributes:
        parameters: of the whole model.
        weights: of a rank.
        kv_per_token: of a rank, keys and values of all layers.
        step: activations of the largest step, and what lies outside of them; an estimate.
    """

    parameters: int
    weights: int
    kv_per_token: int
    step: int

    def kv_bytes(self, total: int, utilization: float) -> int:
        """Return the bytes left for the KV cache on a GPU with `total` bytes. Negative: too little."""
        return int(total * utilization) - self.weights - self.step


def model_size(
    config: ModelConfig,
    *,
    tensor_parallel: int = 1,
    fp8_weights: bool = False,
    fp8_kv: bool = False,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
) -> ModelSize:
    """Return what the model takes on each of `tensor_parallel` GPUs, as the engine lays it out: heads and MLP
    shared out and padded, norms replicated, KV heads replicated where there are more ranks than heads."""
    size = _BYTES[config.dtype]
    whole, rank = _layers(config, 1), _layers(config, tensor_parallel)
    vocabulary = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    final_norm = config.hidden_size
    weights = (-(-vocabulary // tensor_parallel) + final_norm + rank.plain) * size
    if config.quantized is not None:
        weights += _quantized_bytes(config, config.quantized, tensor_parallel)
    else:
        # In FP8 each row of a matrix has a scale in float32.
        weights += rank.matrices + 4 * rank.rows if fp8_weights else rank.matrices * size
    return ModelSize(
        parameters=vocabulary + final_norm + whole.plain + whole.matrices,
        weights=weights,
        kv_per_token=2 * config.num_layers * rank.kv_heads * config.head_dim * (1 if fp8_kv else size),
        step=_OUTSIDE
        + max_num_batched_tokens * size * (4 * config.hidden_size + rank.widest)
        + 2 * max_num_seqs * config.vocab_size * 4,
    )


def encoder_size(config: EncoderConfig, *, max_num_batched_tokens: int = 8192) -> ModelSize:
    """Return what an encoder takes on a GPU. It has no KV cache."""
    hidden, inner = config.hidden_size, config.intermediate_size
    tables = (config.vocab_size + config.positions + config.type_vocab_size + 2) * hidden
    layer = 4 * hidden * (hidden + 1) + 2 * hidden * inner + inner + hidden + 4 * hidden
    head = (hidden + 1) * (hidden + config.labels) if config.labels else 0
    parameters, size = tables + config.num_layers * layer + head, _BYTES[config.dtype]
    step = _OUTSIDE + max_num_batched_tokens * size * (8 * hidden + 2 * inner)
    return ModelSize(parameters=parameters, weights=parameters * size, kv_per_token=0, step=step)


@dataclass(frozen=True, slots=True)
class _Layers:
    """Parameters of all layers of a rank."""

    matrices: int
    rows: int
    """Of the matrices."""
    plain: int
    """Norms, biases, routers: never quantized."""
    kv_heads: int
    widest: int
    """Activations of a token beside the hidden state, in the layer that has most."""


def _layers(config: ModelConfig, ranks: int) -> _Layers:
    hidden, dim, layers = config.hidden_size, config.head_dim, config.num_layers
    heads, kv_heads = _heads(config, ranks)
    projected = (heads + 2 * kv_heads) * dim
    matrices, rows = hidden * (projected + heads * dim), projected + hidden
    names = config.names
    norms = (names.before_attention, names.after_attention, names.before_mlp, names.after_mlp)
    plain = hidden * sum(name is not None for name in norms)
    plain += {"none": 0, "head": 2 * dim, "whole": (heads + kv_heads) * dim}[config.head_norms]
    plain += (projected if config.attention_bias else 0) + (hidden if config.o_bias else 0)

    inner = -(-config.intermediate_size // ranks)
    mlp, mlp_rows = 3 * hidden * inner, 2 * inner + hidden
    mlp_plain = (2 * inner + hidden) if config.mlp_bias else 0
    experts = config.experts
    sparse_layers = 0 if experts is None else layers - len(experts.dense_layers)
    total = layers * matrices + (layers - sparse_layers) * mlp
    total_rows = layers * rows + (layers - sparse_layers) * mlp_rows
    total_plain = layers * plain + (layers - sparse_layers) * mlp_plain
    widest = projected + 3 * inner
    if experts is not None:
        inner = -(-experts.intermediate_size // ranks)
        total += sparse_layers * experts.count * 3 * hidden * inner
        total_rows += sparse_layers * experts.count * (2 * inner + hidden)
        total_plain += sparse_layers * experts.count * hidden  # the router
        shared = -(-experts.shared_size // ranks)
        if shared:
            total += sparse_layers * 3 * hidden * shared
            total_rows += sparse_layers * (2 * shared + hidden)
            total_plain += sparse_layers * (hidden if experts.names.shared_gate is not None else 0)
        widest = max(
            widest if experts.dense_layers else 0, projected + experts.per_token * 3 * inner + 3 * shared
        )
    return _Layers(total, total_rows, total_plain, kv_heads, widest)


def _quantized_bytes(config: ModelConfig, quantized: QuantizedConfig, ranks: int) -> int:
    """Return the bytes of the matrices of a rank as a GPU keeps them (forms.py): projections that are merged
    are quantized only if all of them are, experts only in FP8 with scales of rows."""
    hidden, size, experts = config.hidden_size, _BYTES[config.dtype], config.experts
    heads, kv_heads = _heads(config, ranks)
    names, total = config.names, 0
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        rows = (heads + 2 * kv_heads) * config.head_dim
        qkv = (names.qkv,) if names.qkv else tuple(f"self_attn.{one}_proj" for one in "qkv")
        matrices = [(qkv, rows, hidden, 1), (("self_attn.o_proj",), hidden, heads * config.head_dim, 1)]
        if experts is None or layer in experts.dense_layers:
            inner = -(-config.intermediate_size // ranks)
            gate_up = (names.gate_up,) if names.gate_up else ("mlp.gate_proj", "mlp.up_proj")
            matrices += [(gate_up, 2 * inner, hidden, 1), ((names.down,), hidden, inner, 1)]
        else:
            inner, called = -(-experts.intermediate_size // ranks), experts.names
            both = (f"{called.experts}.0.{called.gate}", f"{called.experts}.0.{called.up}")
            down = (f"{called.experts}.0.{called.down}",)
            matrices += [(both, 2 * inner, hidden, experts.count), (down, hidden, inner, experts.count)]
            if shared := -(-experts.shared_size // ranks):
                both = (f"{called.shared}.gate_proj", f"{called.shared}.up_proj")
                down = (f"{called.shared}.down_proj",)
                matrices += [(both, 2 * shared, hidden, 1), (down, hidden, shared, 1)]
        for modules, rows, columns, count in matrices:
            stored = [quantized.of(f"{prefix}.{module}") for module in modules]
            first, alike = stored[0], all(one == stored[0] for one in stored)
            if first is None or not alike or (count > 1 and not first.is_fp8_rows):
                total += count * rows * columns * size
            else:
                total += count * rows * first.row_bytes(columns, size)
    return total


def _heads(config: ModelConfig, ranks: int) -> tuple[int, int]:
    """Return the query heads and KV heads of a rank."""
    group = config.num_heads // config.num_kv_heads
    kv_heads = -(-config.num_kv_heads // ranks)
    if ranks % config.num_kv_heads == 0:
        return -(-group // (ranks // config.num_kv_heads)), kv_heads
    return kv_heads * group, kv_heads
