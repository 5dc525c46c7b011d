"""MiniMax M2: calls as `<invoke>` within one tag, values as plain text.

    text
    <minimax:tool_call>
    <invoke name="f">
    <parameter name="path">a.txt</parameter>
    </invoke>
    </minimax:tool_call>

The template writes values without blanks around them and so they are read; the parser on the model's page
strips newlines, which would change a text that ends with one.
"""

from __future__ import annotations

from leadline.engine.frontend.tool_formats.grammar import GAP, CallGrammar, ToolSchema, quoted
from leadline.engine.frontend.tool_formats.parser import CallParser, Steps
from leadline.engine.frontend.tool_formats.typed_text import ToolTypes, TypedArguments

__all__ = ["CLOSE", "OPEN", "MiniMaxM2Parser", "rules"]

OPEN = "<minimax:tool_call>"
CLOSE = "</minimax:tool_call>"
_INVOKE = '<invoke name="'
_END = "</invoke>"
_PARAMETER = '<parameter name="'
_VALUE_END = "</parameter>"


def rules(grammar: CallGrammar) -> str:
    """See `ToolFormat.rules`."""
    begins, tag_ends = quoted(_PARAMETER), quoted('">')

    def write(tool: ToolSchema) -> str:
        parameters = grammar.typed_parameters(
            tool, lambda name, value: f"{begins} {name} {tag_ends} {value} {GAP}", _VALUE_END
        )
        opening = quoted(_INVOKE + tool.name + '">')
        return f"{opening} {GAP} {parameters} {quoted(_END)}"

    call = grammar.each(write)
    return f"{grammar.opening(OPEN)} {GAP} {call} {grammar.more(call, GAP)} {GAP} {grammar.tag(CLOSE)}"


class MiniMaxM2Parser(CallParser):
    def __init__(self, types: ToolTypes) -> None:
        super().__init__()
        self._types = types

    def parse(self) -> Steps[None]:
        yield from self.content_until(OPEN)
        yield from self.skip()
        yield from self.expect(_INVOKE)
        yield from self.calls_up_to(CLOSE, _INVOKE, self._call)

    def _call(self) -> Steps[None]:
        name = yield from self.name('"<>\n')
        yield from self.expect('">')
        self.begin(name)
        arguments = TypedArguments(self, self._types, name)
        self.mark(in_call=True)
        yield from self.skip()
        while (yield from self.comes(_PARAMETER)):
            parameter = yield from self.name('"<>\n')
            yield from self.expect('">')
            self.accept()
            yield from arguments.read(parameter, _VALUE_END)
            self.mark(in_call=True)
            yield from self.skip()
        yield from self.expect(_END)
        self.accept()
        arguments.end()
