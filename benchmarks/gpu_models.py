"""Model folders for GPU benchmarks and tests: a Qwen3 config.json of a named shape and a made-up tokenizer.

Weights are random: by `load_format="dummy"`, or in a file, where several ranks have to have the same.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["QUANTIZED", "SHAPES", "write_model", "write_tokenizer", "write_weights"]

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
    "Qwen3-30B-A3B": {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
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
SHAPES["tiny-moe"] = {
    **SHAPES["tiny"],
    "moe_intermediate_size": 80,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
}


def _compressed(written: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": written,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}},
        "ignore": ["lm_head"],
    }


QUANTIZED: dict[str, dict[str, Any]] = {
    "w4a16": _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128),
    "w8a16": _compressed("pack-quantized", num_bits=8, type="int", strategy="channel"),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "nvfp4": _compressed(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    ),
    "mxfp4": _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    "fp8-row": _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "fp8-block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
"""A quantization_config of each kind, to go into a shape as `quantization_config`: weights are drawn in that
form."""


_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path, shape: dict[str, Any], dtype: str, words: Sequence[str] = ()) -> Path:
    """A Qwen3 config.json, and `write_tokenizer` for all of the shape's vocabulary."""
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
    write_tokenizer(folder, shape["vocab_size"], words)
    return folder


def write_tokenizer(folder: Path, vocab_size: int, words: Sequence[str] = ()) -> None:
    """A byte-level tokenizer that cuts text as GPT-2's does, and a ChatML template.

        0 ... 255   bytes
        256 ...     `words`, each with the space before it; then made-up ones of three syllables (" bababa")
        the last 3  special tokens; none is named as the end of a text

    A word in the vocabulary is one token, whatever stands around it, and all else is a token a byte. So what
    a model of random weights writes, read again, gives the ids that it sampled, but for the answers in which
    a single byte or a special token was drawn (of 151,936 ids 259).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    entries = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries += [f"\u0120{word}" for word in words]  # \u0120 stands for a space
    syllables = [consonant + vowel for consonant in "bdfghjklmnprstvwz" for vowel in "aeiou"]
    made = ("\u0120" + "".join(some) for some in itertools.product(syllables, repeat=3))
    entries += itertools.islice(made, vocab_size - len(entries) - len(_SPECIAL))
    entries += _SPECIAL
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": _CHATML}))


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
    }
    experts = shape.get("num_experts", 0)
    if experts:
        inner, sizes["mlp.gate"] = shape["moe_intermediate_size"], (experts, hidden)
    for mlp in [f"mlp.experts.{number}" for number in range(experts)] or ["mlp"]:
        sizes |= {
            f"{mlp}.gate_proj": (inner, hidden),
            f"{mlp}.up_proj": (inner, hidden),
            f"{mlp}.down_proj": (hidden, inner),
        }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if shape.get("model_type", "qwen3").startswith("qwen3"):
        norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, size in sizes.items():
            tensors[f"{prefix}{name}.weight"] = normal(*size)
        for name, width in norms.items():
            tensors[f"{prefix}{name}.weight"] = normal(width, mean=1.0, deviation=0.1)
    save_file(tensors, folder / "model.safetensors")
