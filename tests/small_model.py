"""A model that is quick to load and to run, for tests of what stands around a model."""

from __future__ import annotations

import json
from pathlib import Path

HIDDEN, MLP, HEAD, LAYERS, VOCABULARY = 64, 96, 32, 2, 49152


def write_small_model(source: Path, folder: Path) -> Path:
    """Write a model with the tokenizer and the template of `source` (the demo model) into the empty `folder`.

    It has two small random layers. Its answers are of all tokens there are, halves of characters included,
    and the same each time. Returns the folder."""
    import numpy as np
    from safetensors.numpy import save_file

    config = json.loads((source / "config.json").read_text())
    config |= {"hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": LAYERS, "head_dim": HEAD}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).symlink_to(source / name)
    draw = np.random.default_rng(1)

    def weights(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape, dtype=np.float32) * np.float32(0.2)

    ones = np.ones(HIDDEN, dtype=np.float32)
    tensors = {"model.embed_tokens.weight": weights(VOCABULARY, HIDDEN), "model.norm.weight": ones}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, rows in {"q_proj": 2 * HEAD, "k_proj": HEAD, "v_proj": HEAD}.items():
            tensors[f"{prefix}.self_attn.{name}.weight"] = weights(rows, HIDDEN)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = weights(HIDDEN, 2 * HEAD)
        for name, shape in {"gate": (MLP, HIDDEN), "up": (MLP, HIDDEN), "down": (HIDDEN, MLP)}.items():
            tensors[f"{prefix}.mlp.{name}_proj.weight"] = weights(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = ones
    save_file(tensors, folder / "model.safetensors")
    return folder
