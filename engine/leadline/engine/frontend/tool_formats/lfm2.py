"""LFM2: a list of calls as in Python within a tag.

    <|tool_call_start|>[f(city="Paris"), g()]<|tool_call_end|>text

Liquid's page shows this form; an earlier template writes earlier calls as a list of JSON calls, which is read
too.
"""

from __future__ import annotations

from leadline.engine.frontend.tool_formats.grammar import CallGrammar
from leadline.engine.frontend.tool_formats.json_calls import read_calls
from leadline.engine.frontend.tool_formats.parser import CallParser, Steps
from leadline.engine.frontend.tool_formats.pythonic import list_rules, read_python_calls

__all__ = ["CLOSE", "OPEN", "Lfm2Parser", "rules"]

OPEN = "<|tool_call_start|>"
CLOSE = "<|tool_call_end|>"


def rules(grammar: CallGrammar) -> str:
    """See `ToolFormat.rules`."""
    return f"{grammar.opening(OPEN)} {list_rules(grammar)} {grammar.tag(CLOSE)}"


class Lfm2Parser(CallParser):
    def parse(self) -> Steps[None]:
        yield from self.content_until(OPEN)
        yield from self.skip()
        if (yield from self._is_json()):
            yield from read_calls(self)
        else:
            yield from read_python_calls(self)
        yield from self.may_close(CLOSE)

    def _is_json(self) -> Steps[bool]:
        if (yield from self.peek()) == "{":
            return True
        blanks = 1
        while (start := (yield from self.ahead(blanks + 1))[blanks:]) and start in " \t\r\n":
            blanks += 1
        return start == "{"
