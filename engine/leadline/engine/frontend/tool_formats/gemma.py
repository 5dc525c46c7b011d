"""Gemma 4, and FunctionGemma (Gemma 3): a call in a notation of its own.

    text<|tool_call>call:f{city:<|"|>Paris<|"|>,days:3}<tool_call|>                        Gemma 4
    text<start_function_call>call:f{city:<escape>Paris<escape>}<end_function_call>          FunctionGemma

Keys have no quotes, strings have a token as quote and no escapes. Other Gemma 3 models have no markup:
Google's guide has two prompts for them, one for lists as in Python and one for JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leadline.engine.frontend.tool_formats.grammar import (
    NAME,
    CallGrammar,
    ToolSchema,
    fields_of,
    quoted,
    values_of,
)
from leadline.engine.frontend.tool_formats.literals import Notation, read_object
from leadline.engine.frontend.tool_formats.parser import Broken, CallParser, Steps
from leadline.engine.frontend.tool_formats.typed_text import types_of

__all__ = ["CLOSE", "FUNCTION_CLOSE", "FUNCTION_OPEN", "OPEN", "GemmaParser", "rules"]

OPEN = "<|tool_call>"
CLOSE = "<tool_call|>"
FUNCTION_OPEN = "<start_function_call>"
FUNCTION_CLOSE = "<end_function_call>"
_SCALARS = frozenset(("integer", "number", "boolean", "null"))
_MOST_NESTED = 16


def rules(grammar: CallGrammar, opening: str, closing: str, notation: Notation) -> str:
    """See `ToolFormat.rules`."""
    writer = _ValueRules(grammar, notation.quotes[0])
    call = grammar.each(lambda tool: f"{quoted(f'call:{tool.name}')} {writer.arguments(tool)}")
    return f"{grammar.opening(opening)} {call} {grammar.tag(closing)}"


class _ValueRules:
    """Rules for values in Gemma's notation."""

    def __init__(self, grammar: CallGrammar, quote: str) -> None:
        self._grammar = grammar
        self._quote = quote
        self._any = ""

    def arguments(self, tool: ToolSchema) -> str:
        if tool.parameters is None:
            return self._object_of(NAME, self._anything())
        return self._value({**tool.parameters, "type": "object"}, tool, 0)

    def _value(self, schema: Mapping[str, Any], tool: ToolSchema, depth: int) -> str:
        types = types_of(schema, tool.parameters or {})
        items, properties = schema.get("items"), schema.get("properties")
        if types == {"string"}:
            return self._string(values_of(schema))
        if types and types <= _SCALARS:
            return self._grammar.json(schema, tool)
        if types == {"array"} and isinstance(items, Mapping) and depth < _MOST_NESTED:
            item = self._grammar.rule(self._value(items, tool, depth + 1))
            return f'"[" ({item} ("," {item})*)? "]"'
        if types == {"object"} and isinstance(properties, Mapping) and depth < _MOST_NESTED:
            members = (
                (f'{quoted(name)} ":" {self._value(part, tool, depth + 1)}', required)
                for name, part, required in fields_of(schema)
            )
            return f'"{{" {self._grammar.sequence(members, quoted(","))} "}}"'
        return self._anything()

    def _string(self, values: Sequence[Any]) -> str:
        quote = self._grammar.tag(self._quote)
        if values:
            return f"{quote} ({' | '.join(quoted(str(value)) for value in values)}) {quote}"
        return f"{quote} {self._grammar.text_until(self._quote)}"

    def _anything(self) -> str:
        if not self._any:
            self._any = self._grammar.rule("scalar")
            string = self._string(())
            scalar = self._grammar.json({"type": sorted(_SCALARS)})
            members = self._object_of(NAME, self._any)
            self._grammar.replace(
                self._any, f'{string} | {scalar} | "[" ({self._any} ("," {self._any})*)? "]" | {members}'
            )
        return self._any

    def _object_of(self, name: str, value: str) -> str:
        return f'"{{" ({name} ":" {value} ("," {name} ":" {value})*)? "}}"'


class GemmaParser(CallParser):
    def __init__(self, opening: str, closing: str, notation: Notation) -> None:
        super().__init__()
        self._tags = opening, closing
        self._notation = notation

    def parse(self) -> Steps[None]:
        opening, closing = self._tags
        yield from self.content_until(opening)
        yield from self.skip()
        yield from self.expect("call:")
        name = yield from self.name()
        if (yield from self.peek()) != "{":
            raise Broken
        self.begin(name)
        yield from read_object(self, self.arguments, self._notation)
        yield from self.may_close(closing)
