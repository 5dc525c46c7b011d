"""GLM 4.5 to 4.7: a name, then pairs of key and value, values as plain text.

    text
    <tool_call>f
    <arg_key>path</arg_key>
    <arg_value>a.txt</arg_value>
    </tool_call>

GLM 4.7 writes it without the newlines. A call without arguments is `<tool_call>f</tool_call>`.
"""

from __future__ import annotations

from leadline.engine.frontend.tool_formats.grammar import GAP, CallGrammar, ToolSchema, quoted
from leadline.engine.frontend.tool_formats.parser import CallParser, Steps
from leadline.engine.frontend.tool_formats.typed_text import ToolTypes, TypedArguments

__all__ = ["CLOSE", "KEY", "OPEN", "Glm45Parser", "rules"]

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
KEY = "<arg_key>"
_KEY_END = "</arg_key>"
_VALUE = "<arg_value>"
_VALUE_END = "</arg_value>"


def rules(grammar: CallGrammar) -> str:
    """See `ToolFormat.rules`."""
    key, key_end, value_begins = (grammar.tag(tag) for tag in (KEY, _KEY_END, _VALUE))

    def write(tool: ToolSchema) -> str:
        parameters = grammar.typed_parameters(
            tool, lambda name, value: f"{key} {name} {key_end} {GAP} {value_begins} {value} {GAP}", _VALUE_END
        )
        return f"{quoted(tool.name)} {GAP} {parameters}"

    return f"{grammar.opening(OPEN)} {grammar.each(write)} {grammar.tag(CLOSE)}"


class Glm45Parser(CallParser):
    def __init__(self, types: ToolTypes) -> None:
        super().__init__()
        self._types = types

    def parse(self) -> Steps[None]:
        yield from self.content_until(OPEN)
        yield from self.skip()
        name = yield from self.name()
        yield from self.skip()
        more = yield from self.comes(KEY)
        if not more:
            yield from self.expect(CLOSE)
        self.begin(name)
        arguments = TypedArguments(self, self._types, name)
        while more:
            self.mark(in_call=True)
            parameter = yield from self.name("<\n")
            yield from self.expect(_KEY_END)
            yield from self.skip()
            yield from self.expect(_VALUE)
            self.accept()
            yield from arguments.read(parameter.strip(), _VALUE_END)
            self.mark(in_call=True)
            yield from self.skip()
            more = yield from self.comes(KEY)
            if not more:
                yield from self.expect(CLOSE)
        self.accept()
        arguments.end()
