"""Incremental detokenization: token ids in, text that will not change out.

Owns the bytes of characters that are not complete yet. A character split over several tokens is held back
until it is whole; bytes that can no longer become a character turn into U+FFFD at once, and what is still
incomplete when the sequence ends is flushed as one U+FFFD.

    tokens      [ 0xF0 0x9F ] [ 0x98 ] [ 0x80 "!" ]
    push gives      ""           ""        "😀!"

For byte-level and metaspace vocabularies a push costs O(bytes of the new tokens): bytes go through an
incremental UTF-8 decoder. For any other decoder a window of ids is decoded again with each push and the
difference reported:

    ids   ... |<- prefix: decoded, gives context ->|<- read: not reported yet ->|
               `- window                            `- reported up to here

The window advances whenever its text is complete, so it stays a few tokens long.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from leadline.protocol.text.pieces import JoinKind, LeadingSpace
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["Detokenizer"]

_CONTEXT_TOKENS = 6
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns the output of one sequence into text.

    The concatenation of all `push` results and of `finish` is the full decode of the tokens.
    `prompt_token_ids` only matters for vocabularies that drop a space at the start of a text: output that
    continues a prompt keeps it.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = tokenizer.pieces
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._opaque = self._pieces.kind is JoinKind.OPAQUE
        self._decoder = codecs.getincrementaldecoder("utf-8")(self._pieces.errors)
        self._strip = LeadingSpace.KEEP
        self._split = False
        """The decoder holds bytes of a character."""
        self._window: list[int] = []
        self._reported = 0
        if self._opaque:
            self._window = [i for i in prompt_token_ids[-_CONTEXT_TOKENS:] if i not in self._skipped]
            self._reported = len(self._window)
        elif self._pieces.leading is not LeadingSpace.KEEP and not self._has_text(prompt_token_ids):
            self._strip = self._pieces.leading

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; return the text that became final."""
        if self._opaque:
            return "".join([self._push_opaque(i) for i in token_ids if i not in self._skipped])
        data = b""
        for token_id in token_ids:
            if token_id in self._skipped:
                continue
            piece = self._pieces.bytes_of(token_id)
            if self._strip is not LeadingSpace.KEEP and piece:
                piece = (
                    piece.replace(b" ", b"")
                    if self._strip is LeadingSpace.STRIP_PIECE
                    else piece.removeprefix(b" ")
                )
                self._strip = LeadingSpace.KEEP
            data += piece
        if not self._split and data.isascii():
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self._split = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """End the sequence; return what was held back: U+FFFD for an incomplete character, else nothing."""
        if self._opaque:
            text = self._unreported()
            self._reported = len(self._window)
            return text
        return self._decoder.decode(b"", True)

    def _has_text(self, token_ids: Sequence[int]) -> bool:
        return any(i not in self._skipped and self._pieces.bytes_of(i) for i in reversed(token_ids))

    def _push_opaque(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._unreported()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        del self._window[: self._reported]
        self._reported = len(self._window)
        return text

    def _unreported(self) -> str:
        before = self._tokenizer.decode(self._window[: self._reported])
        return self._tokenizer.decode(self._window)[len(before) :]
