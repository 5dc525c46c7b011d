"""What bytes a token id stands for, and how pieces join to running text.

Two decoder families cover the models we serve, and for both the text of a sequence is "join the pieces'
bytes, read them as UTF-8", which is what makes incremental detokenization exact and O(1) a token:

    byte-level (GPT-2, Llama 3, Qwen)    every character of a vocabulary entry is one byte under a fixed
    alphabet metaspace (SentencePiece)            "▁" is a space, `<0xE4>` is a byte, the first piece may lose
    its space

Anything else is `JoinKind.OPAQUE`: only the library's own `decode` knows, and the detokenizer falls back to
it.

An added token stands for its very text in a byte-level vocabulary, too: "ä" is found in texts as a letter, so
it is no byte 0xE4, which is what the library's decoder makes of it. Only where the vocabulary has the same
entry already, and one id stands for both, it is read as the byte; a byte that makes no character then was the
letter (`PieceTable.errors`).
"""

from __future__ import annotations

import codecs
import enum
import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

__all__ = ["JoinKind", "LeadingSpace", "PieceTable"]

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class JoinKind(enum.Enum):
    BYTE_LEVEL = "byte_level"
    METASPACE = "metaspace"
    OPAQUE = "opaque"


class LeadingSpace(enum.Enum):
    """What happens to spaces at the very start of a decoded text."""

    KEEP = "keep"
    STRIP_ONE = "strip_one"
    """One space of the whole text (the Strip decoder of Llama 2)."""
    STRIP_PIECE = "strip_piece"
    """Every "▁" of the first piece (the Metaspace decoder)."""


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 bytes stand for themselves, the other 68 follow from U+0100
    on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_alphabet()
_LETTERS = frozenset(char for char, byte in _ALPHABET.items() if ord(char) == byte >= 0x80)
"""Stand for the byte that is their own number, and for no character when it comes alone."""


def _in_alphabet_only(text: str) -> bool:
    """Whether a text could be the bytes of others, and is not the same read as either."""
    return not text.isascii() and all(char in _ALPHABET for char in text)


def _errors_as_letters(letters: set[int]) -> str:
    """The name of an error handler that reads these bytes, where they make no character, as the letters of
    their numbers."""
    if not letters:
        return "replace"
    name = f"leadline-letters-{bytes(sorted(letters)).hex()}"
    codecs.register_error(name, _reader_of(letters))
    return name


def _reader_of(letters: set[int]) -> Callable[[UnicodeError], tuple[str, int]]:
    def read(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeDecodeError):
            raise error
        bad = error.object[error.start : error.end]
        if not letters.intersection(bad):
            return "\ufffd", error.end
        # Of several bytes that end too early each is looked at alone.
        return (chr(bad[0]) if bad[0] in letters else "\ufffd"), error.start + 1

    return read


class PieceTable:
    """id → bytes, computed on first use and kept. Safe for threads: entries are only ever filled with one
    value."""

    def __init__(self, backend: tokenizers.Tokenizer, vocab_size: int) -> None:
        self._backend = backend
        self._bytes: list[bytes | None] = [None] * vocab_size
        self._longest: int | None = None
        self.kind, self.leading, self._byte_fallback = _classify(backend)
        self._literal: frozenset[int] = frozenset()
        self.errors = "replace"
        """How bytes are read that are no UTF-8: the name of an error handler of Python's codecs."""
        if self.kind is JoinKind.BYTE_LEVEL:
            added = backend.get_added_tokens_decoder()
            own = {i for i, token in added.items() if not _in_alphabet_only(token.content)}
            if len(own) < len(added):
                vocabulary = backend.get_vocab(with_added_tokens=False)
                shared = "".join(token.content for token in added.values() if token.content in vocabulary)
                own = {i for i, token in added.items() if token.content not in vocabulary}
                self.errors = _errors_as_letters({_ALPHABET[char] for char in shared if char in _LETTERS})
            self._literal = frozenset(own)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token in the middle of a text; empty for ids the vocabulary does not have."""
        if not 0 <= token_id < len(self._bytes):
            return b""
        piece = self._bytes[token_id]
        if piece is None:
            piece = self._bytes[token_id] = self._compute(token_id)
        return piece

    def all_bytes(self) -> list[bytes]:
        """`bytes_of` every id below vocab_size."""
        return [self.bytes_of(i) for i in range(len(self._bytes))]

    @property
    def longest(self) -> int:
        """Bytes of the longest piece: n bytes of text need at least n / longest tokens."""
        if self._longest is None:
            self._longest = max(map(len, self.all_bytes()), default=1) or 1
        return self._longest

    def _compute(self, token_id: int) -> bytes:
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self.kind is JoinKind.BYTE_LEVEL:
            if token_id not in self._literal and all(char in _ALPHABET for char in piece):
                return bytes(_ALPHABET[char] for char in piece)
            return piece.encode()
        if self.kind is JoinKind.METASPACE:
            if self._byte_fallback and (match := _BYTE_PIECE.match(piece)):
                return bytes([int(match[1], 16)])
            return piece.replace("▁", " ").encode()
        return self._backend.decode([token_id], skip_special_tokens=False).encode()


def _classify(backend: tokenizers.Tokenizer) -> tuple[JoinKind, LeadingSpace, bool]:
    """(kind, leading space rule, byte fallback) from the decoder's JSON form."""
    if backend.decoder is None:
        return JoinKind.OPAQUE, LeadingSpace.KEEP, False
    spec: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    types = [step["type"] for step in steps]
    if types == ["ByteLevel"]:
        return JoinKind.BYTE_LEVEL, LeadingSpace.KEEP, False
    leading, replaced = LeadingSpace.KEEP, False
    for step in steps:
        match step["type"]:
            case "Replace" if step["pattern"] == {"String": "▁"} and step["content"] == " ":
                replaced = True
            case "Metaspace" if step["replacement"] == "▁":
                replaced = True
                if step.get("prepend_scheme", "always") != "never":
                    leading = LeadingSpace.STRIP_PIECE
            case "Strip" if step["content"] == " " and step["start"] in (0, 1) and step["stop"] == 0:
                if step["start"] == 1:
                    leading = LeadingSpace.STRIP_ONE
            case "ByteFallback" | "Fuse":
                pass
            case _:
                return JoinKind.OPAQUE, LeadingSpace.KEEP, False
    if not replaced:
        return JoinKind.OPAQUE, LeadingSpace.KEEP, False
    return JoinKind.METASPACE, leading, "ByteFallback" in types
