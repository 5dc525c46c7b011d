"""The header of a GGUF file: its metadata, and where each tensor lies.

    | "GGUF", version, numbers of both | entries: key, type, value | tensors: name, shape, type, offset | data

Everything is little-endian; the data begins at the next multiple of general.alignment, and offsets count from
there. The format is described in ggml's docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leadline.engine.errors import ModelNotFound

__all__ = ["GGUFFile", "GGUFTensor"]

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a metadata value → its format; 8 is a string, 9 an array."""
_STRING, _ARRAY = 8, 9
_MOST_DEPTH = 8


@dataclass(slots=True, frozen=True)
class GGUFTensor:
    shape: tuple[int, ...]
    """As torch has it: the last dimension is contiguous."""
    kind: int
    """ggml's number of the type."""
    start: int
    """Byte of the file."""


class GGUFFile:
    """Parsed once; raises ModelNotFound for a file that is no GGUF file or is cut short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._read(data)
        except (OSError, ValueError, struct.error, UnicodeDecodeError, KeyError) as error:
            raise ModelNotFound(
                f"{path} cannot be read as a GGUF file ({error!r}); is it complete?"
            ) from error

    def _read(self, data: mmap.mmap) -> None:
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, tensors, entries = struct.unpack_from("<IQQ", data, 4)
        if version not in (2, 3):
            raise ValueError(f"version {version}")
        at = 24
        for _ in range(entries):
            key, at = _string(data, at)
            (kind,) = struct.unpack_from("<I", data, at)
            self.metadata[key], at = _value(data, at + 4, kind, 0)
        infos = []
        for _ in range(tensors):
            name, at = _string(data, at)
            (dims,) = struct.unpack_from("<I", data, at)
            shape = struct.unpack_from(f"<{dims}Q", data, at + 4)
            kind, offset = struct.unpack_from("<IQ", data, at + 4 + 8 * dims)
            at += 16 + 8 * dims
            infos.append((name, tuple(reversed(shape)), kind, offset))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment {alignment!r}")
        begin = -(-at // alignment) * alignment
        self.tensors = {name: GGUFTensor(shape, kind, begin + offset) for name, shape, kind, offset in infos}


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    end = at + 8 + length
    if end > len(data):
        raise ValueError("a text reaches beyond the end")
    return data[at + 8 : end].decode(), end


def _value(data: mmap.mmap, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _string(data, at)
    if kind != _ARRAY:
        form = "<" + _NUMBERS[kind]
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner in _NUMBERS:
        form = f"<{count}{_NUMBERS[inner]}"
        return list(struct.unpack_from(form, data, at)), at + struct.calcsize(form)
    if depth == _MOST_DEPTH:
        raise ValueError("arrays are nested too deeply")
    values = []
    for _ in range(count):
        value, at = _value(data, at, inner, depth + 1)
        values.append(value)
    return values, at
