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

__all__ = ["Detokenizer", "StopStrings"]


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


class StopStrings:
    """Stop strings over a stream of text.

    Owns the tail of the text that could still become a stop string. Each stop string is followed by the
    automaton of Knuth, Morris and Pratt (SIAM J. Comput. 6, 1977): its state is the length of the longest
    prefix of the stop string that the text seen so far ends with. So the text that must be held back is
    exactly the largest state, the cost is O(1) amortised per character and stop string, and the result does
    not depend on how the text was cut into pieces.

        stop "DEFG"    text  A B C D E X D E
        state                0 0 0 1 2 0 1 2      after the last character "DE" is held back, "ABCDEX" is out

    The stop string that is complete first wins; of several that end at the same character, the longest. With
    `include` the stop string is part of the text, otherwise the text ends before it. After a hit nothing more
    is pushed.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = [(stop, _failure(stop)) for stop in dict.fromkeys(stops)]
        self._states = [0] * len(self._stops)
        self._include = include
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Add text; return (text that is final, the stop string found or None).

        While not `armed` (min_tokens not reached), stop strings that become complete are ignored; one that
        began then and becomes complete later counts.
        """
        if not self._stops:
            return text, None
        held = len(self._held)
        whole = self._held + text
        for position, char in enumerate(text, start=held + 1):
            found = self._step(char)
            if found is not None and armed:
                self._held = ""
                return whole[: position if self._include else position - len(found)], found
        keep = max(self._states)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], None

    def flush(self) -> str:
        """The sequence ended otherwise: return what was held back."""
        text, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return text

    def _step(self, char: str) -> str | None:
        """Advance every automaton by one character; return the longest stop string that is complete now."""
        found: str | None = None
        for i, (stop, failure) in enumerate(self._stops):
            state = self._states[i]
            while state and stop[state] != char:
                state = failure[state]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                if found is None or len(stop) > len(found):
                    found = stop
                # Fall back to a proper prefix, which keeps `state < len(stop)` and so `stop[state]` valid.
                state = failure[state]
            self._states[i] = state
        return found


def _failure(stop: str) -> list[int]:
    """failure[k]: length of the longest proper prefix of stop[:k] that is also its suffix."""
    failure = [0] * (len(stop) + 1)
    state = 0
    for k in range(1, len(stop)):
        while state and stop[state] != stop[k]:
            state = failure[state]
        if stop[state] == stop[k]:
            state += 1
        failure[k + 1] = state
    return failure
