"""Granite 3: a list of JSON calls behind a tag that is not closed.

    <|tool_call|>[{"name": "f", "arguments": {...}}, ...]

Sources disagree on which of Granite 3.0 to 3.3 writes `<tool_call>` instead; both tags are read. Granite 4
writes as Hermes does, and its template says so.
"""

from __future__ import annotations

from leadline.engine.frontend.tool_formats.grammar import GAP, CallGrammar
from leadline.engine.frontend.tool_formats.json_calls import read_calls
from leadline.engine.frontend.tool_formats.parser import CallParser, Steps

__all__ = ["OPEN", "GraniteParser", "rules"]

OPEN = "<|tool_call|>"
_OTHER = "<tool_call>"
_CLOSE = "</tool_call>"


def rules(grammar: CallGrammar) -> str:
    """See `ToolFormat.rules`."""
    return f"{grammar.opening(OPEN)} {GAP} {grammar.json_list('arguments')}"


class GraniteParser(CallParser):
    def parse(self) -> Steps[None]:
        tag = yield from self.content_until(OPEN, _OTHER)
        yield from read_calls(self)
        if tag == _OTHER:
            yield from self.may_close(_CLOSE)
