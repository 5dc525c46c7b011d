"""The demo model with few of its layers: real weights and tokenizer, at a fifth of the cost.

For tests of how work is cut into steps, which is the same for any number of layers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from leadline.engine.hub.local import LocalModel

__all__ = ["cache_of_tests", "shallow_model"]

LAYERS = (0, 1, 2, 3, 28, 29)
"""The outer layers, which read and write embeddings: with these no two answers come near a tie."""


def cache_of_tests() -> Path:
    """The folder for files that tests compute once."""
    folder = Path(os.environ.get("LEADLINE_CACHE") or "~/.cache/leadline").expanduser() / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def shallow_model(local: LocalModel) -> LocalModel:
    """The model that has LAYERS of `local`, from the folder of cached files; written there if it is not."""
    name = f"shallow-{local.revision[:12]}-{'-'.join(map(str, LAYERS))}"
    folder = cache_of_tests() / name
    if not folder.is_dir():
        scratch = folder.with_suffix(f".{os.getpid()}.tmp")
        scratch.mkdir()
        _write(local.path, scratch)
        try:
            scratch.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(scratch)
    return LocalModel(folder, "shallow", local.revision)


def _write(source: Path, folder: Path) -> None:
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": len(LAYERS)}))
    kept = {}
    with safe_open(source / "model.safetensors", framework="pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 - it is no dict
            layer = re.match(r"model\.layers\.(\d+)\.", key)
            if layer is None:
                kept[key] = tensors.get_tensor(key)
            elif int(layer[1]) in LAYERS:
                place = LAYERS.index(int(layer[1]))
                kept[f"model.layers.{place}.{key[layer.end() :]}"] = tensors.get_tensor(key)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
