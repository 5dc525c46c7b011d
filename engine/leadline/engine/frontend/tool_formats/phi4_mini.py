"""Phi-4-mini: a list of JSON calls behind a tag.

    text<|tool_call|>[{"name": "f", "arguments": {...}}, ...]<|/tool_call|>

The model's page shows this form. A template of vLLM's asks for `functools[{...}, ...]` instead, which models
write without being asked, too. Both are read, and a single call without the list.
"""

from __future__ import annotations

from leadline.engine.frontend.tool_formats.grammar import CallGrammar
from leadline.engine.frontend.tool_formats.json_calls import read_calls
from leadline.engine.frontend.tool_formats.parser import CallParser, Steps

__all__ = ["CLOSE", "OPEN", "PLAIN", "Phi4MiniParser", "rules"]

OPEN = "<|tool_call|>"
CLOSE = "<|/tool_call|>"
PLAIN = "functools["


def rules(grammar: CallGrammar) -> str:
    """See `ToolFormat.rules`."""
    return f"{grammar.opening(OPEN)} {grammar.json_list('arguments')} {grammar.tag(CLOSE)}"


class Phi4MiniParser(CallParser):
    def parse(self) -> Steps[None]:
        tag = yield from self.content_until(OPEN, PLAIN)
        yield from read_calls(self, in_list=tag == PLAIN)
        yield from self.may_close(CLOSE)
