"""Hermes and Qwen tool calls: `<tool_call>` JSON `</tool_call>`, any number of them, anywhere in the text.

    state CONTENT   hold back whitespace + the beginning of an opening tag, pass on the rest
    state CALL      collect until the closing tag that stands outside a JSON string

A closing tag that never comes (the model went on to EOS) is forgiven when the JSON is complete.
"""

from __future__ import annotations

from leadline.engine.frontend.json_scan import JsonScanner, partial_suffix
from leadline.engine.frontend.tools import ParsedText, calls_from_json

__all__ = ["HermesParser"]

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


class HermesParser:
    """See the module. One instance per output."""

    def __init__(self) -> None:
        self._held = ""
        self._body: str | None = None
        """Text since the opening tag; None in state CONTENT."""
        self._gap = ""
        """Whitespace before the opening tag, given back if the call turns out malformed."""
        self._scanner = JsonScanner()
        self._after_call = False
        self._any_content = False
        self._num_calls = 0

    def push(self, text: str) -> ParsedText:
        out = ParsedText()
        while text:
            text = self._in_content(text, out) if self._body is None else self._in_call(text, out)
        return out

    def finish(self) -> ParsedText:
        out = ParsedText()
        if self._body is not None:
            body = self._body
            # A closing tag cut short is markup as well.
            self._close(body[: len(body) - partial_suffix(body, _CLOSE)], body, out)
        elif not (self._after_call and self._held.isspace()):
            out.content += self._held
        self._held = ""
        return out

    def _in_content(self, text: str, out: ParsedText) -> str:
        text, self._held = self._held + text, ""
        at = text.find(_OPEN)
        if at >= 0:
            before, rest = text[:at], text[at + len(_OPEN) :]
            content = before.rstrip()
            self._gap = before[len(content) :]
            self._emit(content, out)
            self._body, self._scanner = "", JsonScanner()
            return rest
        content = text[: len(text) - partial_suffix(text, _OPEN)].rstrip()
        self._held = text[len(content) :]
        self._emit(content, out)
        return ""

    def _in_call(self, text: str, out: ParsedText) -> str:
        assert self._body is not None
        for position, char in enumerate(text, start=1):
            self._body += char
            self._scanner.feed(char)
            if char == ">" and not self._scanner.in_string and self._body.endswith(_CLOSE):
                body = self._body
                self._close(body[: -len(_CLOSE)], body, out)
                return text[position:]
        return ""

    def _close(self, json_text: str, raw: str, out: ParsedText) -> None:
        """Back to state CONTENT with a call, or with the markup as content."""
        calls = calls_from_json(json_text, first_index=self._num_calls)
        self._body = None
        if calls:
            self._num_calls += len(calls)
            self._after_call = True
            out.calls += calls
        else:
            out.content += self._gap + _OPEN + raw
            self._after_call = False
            self._any_content = True

    def _emit(self, content: str, out: ParsedText) -> None:
        if self._after_call and not self._any_content:
            content = content.lstrip()
        if content:
            self._after_call = False
            self._any_content = True
            out.content += content
