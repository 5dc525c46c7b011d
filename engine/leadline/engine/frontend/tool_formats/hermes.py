"""Hermes and Qwen: `text <tool_call>{"name": "f", "arguments": {...}}</tool_call> <tool_call>...`

Any number of calls, anywhere in the text. A closing tag that never comes, since the model went on to EOS, is
forgiven, and so is a missing last brace.
"""

from __future__ import annotations

from leadline.engine.frontend.tool_formats.grammar import GAP, CallGrammar
from leadline.engine.frontend.tool_formats.json_calls import read_calls
from leadline.engine.frontend.tool_formats.parser import CallParser, Steps

__all__ = ["CLOSE", "OPEN", "HermesParser", "rules"]

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


def rules(grammar: CallGrammar) -> str:
    """See `ToolFormat.rules`."""
    return f"{grammar.opening(OPEN)} {GAP} {grammar.json_call('arguments')} {GAP} {grammar.tag(CLOSE)}"


class HermesParser(CallParser):
    def parse(self) -> Steps[None]:
        yield from self.content_until(OPEN)
        yield from read_calls(self)
        self.mark()
        yield from self.closing(CLOSE)
