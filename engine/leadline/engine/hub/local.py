"""A model folder on this machine: what it is called, which revision it holds, and whether it is one at all.

Owns the revision of folders that carry none. It must be equal on every pod that holds the same files,
whatever their timestamps, because it enters the namespace of the prefix chain; and it must differ when
weights differ. So it is a digest of contents: the whole config.json, of every safetensors file its name,
size, header (names, dtypes, shapes) and a sample out of each tensor, and of a GGUF file its size and samples
out of all of it. Retrained weights differ in the samples; reading takes milliseconds, not minutes.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from leadline.engine.errors import ModelNotFound

__all__ = ["LocalModel", "check_model_folder", "file_revision", "folder_revision"]

_SAMPLE_BYTES = 256
_FILE_SAMPLES, _FILE_SAMPLE_BYTES = 64, 4096
_MAX_HEADER_BYTES = 100 << 20  # the safetensors format's own limit


@dataclass(slots=True, frozen=True)
class LocalModel:
    """A model that can be loaded: folder, and the two names that enter the prefix chain's namespace."""

    path: Path
    """Folder with config.json, tokenizer files and *.safetensors."""
    model_id: str
    """`smollm2`, `org/name`, or a local folder's own name."""
    revision: str
    """The hub's commit hash, or a digest of the contents."""


def check_model_folder(path: Path, *, asked: str) -> None:
    """Raise ModelNotFound unless `path` is a folder with a config.json."""
    if not path.exists():
        raise ModelNotFound(f"no model at {path} (asked for as {asked!r}): the path does not exist")
    if not path.is_dir():
        raise ModelNotFound(
            f"{path} is a file; a model is a folder with config.json and *.safetensors, or a *.gguf file"
        )
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{path} is no model folder: it has no config.json")


def folder_revision(path: Path) -> str:
    """32 hexadecimal digits, a function of contents only (see the module docstring)."""
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, (path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        _feed(digest, file.name.encode())
        _feed_weights(digest, file)
    for file in sorted(path.glob("*.gguf")):
        _feed(digest, file_revision(file).encode())
    return digest.hexdigest()


def file_revision(path: Path) -> str:
    """Return 32 hexadecimal digits, a function of the size of a file and of samples from its first to its
    last byte."""
    size = path.stat().st_size
    digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
    with path.open("rb") as handle:
        for number in range(_FILE_SAMPLES):
            handle.seek(max(0, size - _FILE_SAMPLE_BYTES) * number // (_FILE_SAMPLES - 1))
            digest.update(handle.read(_FILE_SAMPLE_BYTES))
    return digest.hexdigest()


def _feed(digest: hashlib.blake2b, data: bytes) -> None:
    """Length first, so that nothing collides by concatenation."""
    digest.update(struct.pack("<Q", len(data)))
    digest.update(data)


def _feed_weights(digest: hashlib.blake2b, file: Path) -> None:
    # | u64 header length | JSON header: name → dtype, shape, [begin, end) | data: offsets count from here |
    if not file.is_file():
        raise ModelNotFound(f"{file} leads to no file; copy a model with what its links lead to")
    with file.open("rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        digest.update(struct.pack("<Q", size))
        length_bytes = handle.read(8)
        length = struct.unpack("<Q", length_bytes)[0] if len(length_bytes) == 8 else 0
        if length > min(_MAX_HEADER_BYTES, size - 8):
            return  # not a safetensors file; the loader says so with the file's name
        header = handle.read(length)
        _feed(digest, header)
        try:
            entries = json.loads(header or b"{}")
            places = [entries[name]["data_offsets"] for name in sorted(entries) if name != "__metadata__"]
            for begin, end in places:
                middle = max(begin, (begin + end - _SAMPLE_BYTES) // 2)
                digest.update(
                    os.pread(handle.fileno(), min(_SAMPLE_BYTES, end - middle), 8 + length + middle)
                )
        except (ValueError, TypeError, KeyError, OSError, OverflowError):
            return  # of another shape: again the loader's to say
