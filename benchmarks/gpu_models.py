"""Model folders for GPU benchmarks and tests: a Qwen3 config.json of a named shape and a made-up tokenizer.

Weights are random: by `load_format="dummy"`, or in a file, where several ranks have to have the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["SHAPES", "write_model", "write_weights"]

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "Qwen3-8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "Llama-3.1-70B": {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 28672,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "vocab_size": 12000,
        "max_position_embeddings": 4096,
    },
}


def write_model(folder: Path, shape: dict[str, Any], dtype: str) -> Path:
    """A Qwen3 config.json and a tokenizer whose words are the bytes and w256, w257, ..."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "torch_dtype": dtype,
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"w{i}" for i in range(len(words), shape["vocab_size"])]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_weights(folder: Path, shape: dict[str, Any], dtype: str, seed: int = 0) -> None:
    """model.safetensors for the config.json of `write_model`; drawn on the GPU if there is one."""
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    kind = getattr(torch, dtype)

    def normal(*size: int, mean: float = 0.0, deviation: float | None = None) -> torch.Tensor:
        """Without a deviation: outputs about as large as inputs."""
        value = torch.empty(size, dtype=kind, device=device)
        return value.normal_(mean, deviation or size[-1] ** -0.5, generator=generator).cpu()

    hidden, dim, inner = shape["hidden_size"], shape["head_dim"], shape["intermediate_size"]
    heads, kv_heads = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    tensors = {"model.embed_tokens.weight": normal(shape["vocab_size"], hidden)}
    tensors["model.norm.weight"] = normal(hidden, mean=1.0, deviation=0.1)
    if not shape.get("tie_word_embeddings", True):
        tensors["lm_head.weight"] = normal(shape["vocab_size"], hidden)
    sizes = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if shape.get("model_type", "qwen3") == "qwen3":
        norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, size in sizes.items():
            tensors[f"{prefix}{name}.weight"] = normal(*size)
        for name, width in norms.items():
            tensors[f"{prefix}{name}.weight"] = normal(width, mean=1.0, deviation=0.1)
    save_file(tensors, folder / "model.safetensors")
