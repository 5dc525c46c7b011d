"""Llama 3 tool calls: bare JSON objects at the start of the output, or after `<|python_tag|>`.

    state START     only whitespace so far; `{` or `[` begins a call, anything else is content
    state CONTENT   pass on, but hold back what could become the tag; after the tag: state CALLS
    state CALLS     JSON values separated by whitespace, `;` or `,`

The tag is a special token and usually not in the text at all, hence state START. A value that is no call (an
ordinary JSON answer) becomes content as soon as it is complete, and so does all that follows it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

from leadline.engine.frontend.json_scan import JsonScanner, partial_suffix
from leadline.engine.frontend.tools import ParsedText, calls_from_json

__all__ = ["LlamaJsonParser"]

_TAG = "<|python_tag|>"
_SEPARATORS = frozenset(" \t\r\n;,")


class _State(enum.Enum):
    START = enum.auto()
    CONTENT = enum.auto()
    CALLS = enum.auto()
    PLAIN = enum.auto()
    """Content to the end, tags included."""


class LlamaJsonParser:
    """See the module. One instance per output. With `names`, only objects naming one of them are calls."""

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = frozenset(names)
        self._state = _State.START
        self._held = ""
        """Text not given out yet: whitespace and tag beginnings, or the markup since the last complete
        call."""
        self._json_at: int | None = None
        """Where in `_held` the JSON value being read begins; None between values."""
        self._scanner = JsonScanner()
        self._num_calls = 0

    def push(self, text: str) -> ParsedText:
        out = ParsedText()
        for char in text:
            self._held += char
            if self._state is _State.CALLS:
                self._in_calls(char, out)
            elif self._state is _State.START:
                self._at_start(char, out)
        if self._state is _State.CONTENT:
            self._in_content(out)
        elif self._state is _State.PLAIN:
            self._give_out(out)
        return out

    def finish(self) -> ParsedText:
        out = ParsedText()
        only_separators = _SEPARATORS.issuperset(self._held)
        if not (self._state is _State.CALLS and self._num_calls and only_separators):
            self._give_out(out)
        self._held = ""
        return out

    def _at_start(self, char: str, out: ParsedText) -> None:
        seen = self._held.lstrip()
        if seen in ("{", "["):
            self._state = _State.CALLS
            self._in_calls(char, out)
        elif seen == _TAG:
            self._state = _State.CALLS
        elif not _TAG.startswith(seen):
            self._state = _State.CONTENT

    def _in_content(self, out: ParsedText) -> None:
        at = self._held.find(_TAG)
        if at >= 0:
            content = self._held[:at].rstrip()
            rest = self._held[at + len(_TAG) :]
            # The tag and the whitespace before it stay in `_held`, in case no call follows.
            self._held, out.content = self._held[len(content) : at + len(_TAG)], out.content + content
            self._state = _State.CALLS
            tail = self.push(rest)
            out.content += tail.content
            out.calls += tail.calls
            return
        keep = partial_suffix(self._held, _TAG)
        content = self._held[: len(self._held) - keep].rstrip()
        out.content += content
        self._held = self._held[len(content) :]

    def _in_calls(self, char: str, out: ParsedText) -> None:
        if self._json_at is None:
            if char in _SEPARATORS:
                return
            if char not in "{[":
                self._state = _State.PLAIN
                return
            self._json_at, self._scanner = len(self._held) - 1, JsonScanner()
        if not self._scanner.feed(char):
            return
        calls = calls_from_json(self._held[self._json_at :], first_index=self._num_calls, names=self._names)
        self._json_at = None
        if calls:
            self._num_calls += len(calls)
            out.calls += calls
            self._held = ""
        else:
            self._state = _State.PLAIN

    def _give_out(self, out: ParsedText) -> None:
        out.content += self._held
        self._held = ""
