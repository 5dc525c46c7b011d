"""Llama 3.2 and 4, Gemma 3 by prompt: a list of calls as in Python, at the start of the output.

    [f(city="Paris", days=3), g()]

Llama 4 may put it between `<|python_start|>` and `<|python_end|>`. Only calls of known tools are calls: a
list is an ordinary answer, too. Words and strings may be Python's or JSON's.

Meta's templates of Llama 3.2 and 4 ask for JSON, Meta's page on Llama 4 shows this form, and vLLM has
templates that ask for it. The template decides.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from leadline.engine.frontend.tool_formats.grammar import (
    GAP,
    NAME,
    CallGrammar,
    ToolSchema,
    fields_of,
    quoted,
)
from leadline.engine.frontend.tool_formats.literals import PYTHON, read_value
from leadline.engine.frontend.tool_formats.parser import Broken, CallParser, Steps

__all__ = ["END", "START", "PythonicParser", "list_rules", "read_python_calls", "rules", "start"]

START = "<|python_start|>"
END = "<|python_end|>"
_COMMA = f'"," {GAP}'
_PLAIN = frozenset(("type", "description", "title", "default", "examples"))
_STRING = r"""(/"([^"\\\n]|\\.)*"/ | /'([^'\\\n]|\\.)*'/)"""


def rules(grammar: CallGrammar) -> str:
    """See `ToolFormat.rules`."""
    bare = grammar.rule(f"{list_rules(grammar)} {grammar.tag(END)}?", name="bare")
    return f"{grammar.tag(START)}? {bare}"


def start(grammar: CallGrammar) -> str:
    """See `ToolFormat.start`: what begins with a bracket is a call."""
    text = r"/[ \n]{0,4}[^\[ \n](.|\n)*/"
    return f"({text} | {text} {grammar.tag(START)} bare | {GAP} call)?"


def list_rules(grammar: CallGrammar) -> str:
    """A rule for `[f(a=1), g()]`."""
    call = grammar.each(lambda tool: f'{quoted(tool.name)} "(" {_keyword_rules(grammar, tool)} ")"')
    return f'"[" {call} {grammar.more(call, _COMMA)} "]"'


def _keyword_rules(grammar: CallGrammar, tool: ToolSchema) -> str:
    if tool.parameters is None:
        item = f'{NAME} "=" ({_STRING} | {grammar.json({})})'
        return f"({item} ({_COMMA} {item})*)?"
    items = (
        (f'{quoted(name)} "=" {_value_rules(grammar, tool, schema)}', required)
        for name, schema, required in fields_of(tool.parameters)
    )
    return grammar.sequence(items, _COMMA)


def _value_rules(grammar: CallGrammar, tool: ToolSchema, schema: Mapping[str, Any]) -> str:
    """Python's words and strings, where the schema asks for nothing that only JSON's rules know."""
    if schema.keys() <= _PLAIN and schema.get("type") == "string":
        return _STRING
    if schema.keys() <= _PLAIN and schema.get("type") == "boolean":
        return '("True" | "False" | "true" | "false")'
    return grammar.json(schema, tool)


class PythonicParser(CallParser):
    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._at_start = True

    def parse(self) -> Steps[None]:
        if not (self._at_start and (yield from self._starts_with_list())):
            yield from self.content_until(START)
        yield from self.skip()
        yield from read_python_calls(self, self._names)
        yield from self.may_close(END)

    def _starts_with_list(self) -> Steps[bool]:
        self._at_start = False
        self.mark()
        yield from self.skip()
        if (yield from self.comes(START)) or (yield from self.peek()) == "[":
            return True
        self.unread()
        return False


def read_python_calls(parser: CallParser, names: Collection[str] = ()) -> Steps[None]:
    """Read `[f(a=1), g()]`. Raises Broken. With `names`, only those are calls."""
    yield from parser.expect("[")
    yield from parser.skip()
    while True:
        name = yield from parser.name()
        yield from parser.expect("(")
        if names and name not in names:
            raise Broken
        parser.begin(name)
        yield from _keywords(parser)
        parser.mark()
        yield from parser.skip()
        if not (yield from parser.comes(",")):
            break
        yield from parser.skip()
    yield from parser.expect("]")


def _keywords(parser: CallParser) -> Steps[None]:
    """Read `a=1, b=2)`, the arguments of the call that has begun."""
    before = "{"
    parser.mark(in_call=True)
    yield from parser.skip()
    while not (yield from parser.comes(")")):
        key = yield from parser.name()
        yield from parser.skip()
        yield from parser.expect("=")
        yield from parser.skip()
        parser.accept()
        parser.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        yield from read_value(parser, parser.arguments, PYTHON)
        parser.mark(in_call=True)
        yield from parser.skip()
        if (yield from parser.comes(",")):
            yield from parser.skip()
        elif (yield from parser.peek()) != ")":
            raise Broken
    parser.accept()
    parser.arguments("{}" if before == "{" else "}")
