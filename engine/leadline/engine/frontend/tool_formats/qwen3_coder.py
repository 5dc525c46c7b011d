"""Qwen3-Coder, Qwen3.5 and later: a tag for each parameter, values as plain text.

    text
    <tool_call>
    <function=f>
    <parameter=path>
    a.txt
    </parameter>
    </function>
    </tool_call>

One newline at each end of a value belongs to the markup. Models leave `<tool_call>` out now and then:
`<function=` of a known tool begins a call too. vLLM also ends a value at the next `<parameter=`, for models
that forget the closing tag; here a value ends at `</parameter>` alone, since what an agent writes into files
may hold such lines.
"""

from __future__ import annotations

from leadline.engine.frontend.tool_formats.grammar import GAP, CallGrammar, ToolSchema, quoted
from leadline.engine.frontend.tool_formats.parser import Broken, CallParser, Steps
from leadline.engine.frontend.tool_formats.typed_text import ToolTypes, TypedArguments

__all__ = ["CLOSE", "FUNCTION", "OPEN", "Qwen3CoderParser", "rules"]

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION = "<function="
_END = "</function>"
_PARAMETER = "<parameter="
_VALUE_ENDS = ("\n</parameter>", "</parameter>")


def rules(grammar: CallGrammar) -> str:
    """See `ToolFormat.rules`."""

    def write(tool: ToolSchema) -> str:
        parameters = grammar.typed_parameters(
            tool, lambda name, value: f'"{_PARAMETER}" {name} ">\\n" {value} {GAP}', _VALUE_ENDS[0]
        )
        opening = f"{FUNCTION}{tool.name}>"
        body = grammar.rule(f'{GAP} {parameters} "{_END}"')
        if grammar.in_text:
            untagged.append(f"{grammar.opening(opening)} {body}")
        return f"{quoted(opening)} {body}"

    untagged: list[str] = []
    call = f"{grammar.opening(OPEN)} {GAP} {grammar.each(write)} {GAP} {grammar.tag(CLOSE)}"
    return " | ".join([call, *untagged])


class Qwen3CoderParser(CallParser):
    def __init__(self, types: ToolTypes) -> None:
        super().__init__()
        self._types = types

    def parse(self) -> Steps[None]:
        tag = yield from self.content_until(OPEN, FUNCTION)
        if tag == OPEN:
            yield from self.skip()
            yield from self.expect(FUNCTION)
        name = yield from self.name()
        yield from self.expect(">")
        if tag == FUNCTION and name not in self._types:
            raise Broken
        self.begin(name)
        arguments = TypedArguments(self, self._types, name)
        self.mark(in_call=True)
        yield from self.skip()
        while (yield from self.comes(_PARAMETER)):
            parameter = yield from self.name("<>\n")
            yield from self.expect(">")
            yield from self.comes("\n")
            self.accept()
            yield from arguments.read(parameter, *_VALUE_ENDS)
            self.mark(in_call=True)
            yield from self.skip()
        if (yield from self.comes(_END)):
            self.accept()
            arguments.end()
            yield from self.may_close(CLOSE)
        else:
            yield from self.expect(CLOSE)
            arguments.end()
