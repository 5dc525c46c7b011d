"""Runs in a pod of the engine's image: a hub with one private model of random weights, sent slowly.

python hub_in_a_pod.py PORT TOKEN
"""

from __future__ import annotations

import json
import sys
import time
from typing import BinaryIO

import numpy as np
from fake_hub import FakeHub, Repository
from safetensors.numpy import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN, INNER, LAYERS, VOCABULARY = 1024, 4096, 3, 256
BYTES_A_SECOND = 30_000_000


class SlowHub(FakeHub):
    def send(self, out: BinaryIO, path: str, body: bytes) -> None:
        piece = BYTES_A_SECOND // 10
        for begin in range(0, len(body), piece):
            out.write(body[begin : begin + piece])
            if begin + piece < len(body):
                time.sleep(0.1)  # this is what makes it slow


def tokenizer() -> bytes:
    """One token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made.to_str().encode()


def weights() -> bytes:
    noise = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return noise.standard_normal((rows, columns), dtype=np.float32) * 0.02

    ones = np.ones(HIDDEN, dtype=np.float32)
    tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "model.norm.weight": ones}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in "qkvo":
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = matrix(HIDDEN, HIDDEN)
        for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = ones
    return bytes(save(tensors))


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}

if __name__ == "__main__":
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast"}',
        "model.safetensors": weights(),
    }
    repository = Repository(files, token=sys.argv[2])
    SlowHub({"org/tiny": repository}, ("0.0.0.0", int(sys.argv[1]))).server.serve_forever()
