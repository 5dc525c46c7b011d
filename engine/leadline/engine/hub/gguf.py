"""A GGUF file as a model folder: config.json and tokenizer, made of the file's metadata, beside a link to it.

    <cache>/models/gguf-NAME-<key>/     key = digest of converter version, path, size and time of the file
        config.json, generation_config.json, tokenizer.json, tokenizer_config.json
        model.gguf                      a link; the loader reads its tensors (models/gguf_weights.py)

transformers makes the tokenizer, which takes a while, so it is made only where it is needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leadline.engine.errors import ConfigError, UnsupportedModel
from leadline.engine.hub.gguf_file import GGUFFile
from leadline.engine.hub.local import LocalModel, file_revision
from leadline.engine.system.progress import ReportStage, no_report

__all__ = ["gguf_config", "resolve_gguf"]

_CONVERTER = 1  # raise it when the written files change, so that old ones are not used

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
_NEEDED = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
_WITHOUT_EFFECT = {"attention.value_length", "vocab_size"}
"""They repeat what tensors say."""
_PRE_TOKENIZERS = ("default", "smollm")
"""Ways of cutting text into words that the tokenizer made here has."""
_GEMMA3_27B_LAYERS = 62


def resolve_gguf(
    path: Path,
    *,
    download_dir: str | os.PathLike[str] | None,
    report: ReportStage = no_report,
    config_only: bool = False,
) -> LocalModel:
    """Return the folder of the GGUF file at `path`, written first if it is not there.

    `config_only`: without a tokenizer. Raises ModelNotFound (no GGUF file), UnsupportedModel (naming what is
    not supported), ConfigError (the cache cannot be written).
    """
    path = path.resolve()
    cache = Path(download_dir or os.environ.get("LEADLINE_CACHE") or "~/.cache/leadline").expanduser()
    state = path.stat()
    identity = f"{_CONVERTER}\0{path}\0{state.st_size}\0{state.st_mtime_ns}"
    key = hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()
    target = cache / "models" / f"gguf-{path.stem}-{key}"
    try:
        if not (target / "config.json").is_file():
            _write(target, _config_files(path), path)
        if not config_only and not (target / "tokenizer.json").is_file():
            report("making the tokenizer of a GGUF file", None, f"in {target}")
            _write_tokenizer(path, target)
    except OSError as error:
        raise ConfigError(
            f"cannot write {target} ({error}); set LEADLINE_CACHE (or download_dir) to a directory that can "
            "be written"
        ) from error
    return LocalModel(target, path.stem, file_revision(path))


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """Return the config.json that the metadata describes. Raises UnsupportedModel naming the key."""
    metadata = file.metadata
    name = metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: general.architecture is {name!r}; {', '.join(_ARCHITECTURES)} are supported as "
            "GGUF files, others as safetensors"
        )
    architecture, model_type = _ARCHITECTURES[name]
    own = {
        key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")
    }
    config: dict[str, Any] = {"architectures": [architecture], "model_type": model_type, "dtype": "bfloat16"}
    for key, field in _NEEDED.items():
        if key not in own:
            raise UnsupportedModel(f"{file.path} lacks {name}.{key}")
        config[field] = own.pop(key)
    config |= {field: own.pop(key) for key, field in _OPTIONAL.items() if key in own}
    config |= _rope_scaling(file, name, own)
    heads, rotated = config["num_attention_heads"], own.pop("rope.dimension_count", None)
    if not isinstance(heads, int) or heads < 1 or not isinstance(config["hidden_size"], int):
        raise UnsupportedModel(
            f"{file.path}: {name}.attention.head_count and embedding_length must be positive numbers"
        )
    if unknown := own.keys() - _WITHOUT_EFFECT:
        raise UnsupportedModel(f"{file.path}: {name}.{min(unknown)} is not supported")
    if "rope_freqs.weight" in file.tensors:
        raise UnsupportedModel(
            f"{file.path} has rope_freqs.weight (Llama 3.1's frequencies): use safetensors"
        )
    if "token_embd.weight" not in file.tensors or len(file.tensors["token_embd.weight"].shape) != 2:
        raise UnsupportedModel(f"{file.path} lacks token_embd.weight, a matrix")
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    head_dim = config.get("head_dim", 256 if name == "gemma3" else config["hidden_size"] // heads)
    if rotated not in (None, head_dim):
        raise UnsupportedModel(
            f"{file.path}: {name}.rope.dimension_count {rotated} differs from the head of {head_dim}: not "
            "supported"
        )
    if name == "gemma3":
        whole = config["num_hidden_layers"] == _GEMMA3_27B_LAYERS
        config["query_pre_attn_scalar"] = config["hidden_size"] // heads if whole else head_dim
    for key, field in (("bos", "bos_token_id"), ("eos", "eos_token_id")):
        config[field] = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return config


def _rope_scaling(file: GGUFFile, name: str, own: dict[str, Any]) -> dict[str, Any]:
    """Take the keys about it out of `own`."""
    kind = own.pop("rope.scaling.type", "none")
    factor = own.pop("rope.scaling.factor", 1.0)
    if kind not in ("none", "linear"):
        raise UnsupportedModel(f"{file.path}: {name}.rope.scaling.type {kind!r} is not supported")
    return {"rope_scaling": {"rope_type": "linear", "factor": factor}} if kind == "linear" else {}


def _config_files(path: Path) -> dict[str, Mapping[str, Any]]:
    file = GGUFFile(path)
    config = gguf_config(file)
    end = {file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")} - {None}
    return {"config.json": config, "generation_config.json": {"eos_token_id": sorted(end)}}


def _write(target: Path, files: Mapping[str, Mapping[str, Any]], source: Path) -> None:
    """Write a folder whole, or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        folder.chmod(0o755)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")
        (folder / "model.gguf").symlink_to(source)
        try:
            folder.rename(target)
        except OSError:
            if not (target / "config.json").is_file():  # else another process was first
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_tokenizer(source: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    metadata = GGUFFile(source).metadata
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if metadata.get("tokenizer.ggml.model") != "llama" and pre not in _PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{source}: tokenizer.ggml.pre {pre!r} is not supported; {' and '.join(_PRE_TOKENIZERS)} are"
        )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if pre == "smollm":
        from leadline.engine.hub.demo import split_digits

        split_digits(tokenizer)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        tokenizer.save_pretrained(scratch)
        # tokenizer.json last: where it is, the others are.
        for file in sorted(Path(scratch).iterdir(), key=lambda file: file.name == "tokenizer.json"):
            file.chmod(0o644)
            file.replace(target / file.name)
