"""Grammars that hold calls to a model's own form: Lark rules, as the grammar library reads them.

Each format writes the rule `call`, which matches one or several calls from their opening tag on. `instead`
uses the rule alone: the output is calls or an answer by a schema. `within_text` allows any text, in which an
opening tag begins calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leadline.engine.errors import RequestError
from leadline.engine.frontend.tool_formats.typed_text import types_of

__all__ = [
    "ANY_TEXT",
    "GAP",
    "NAME",
    "WHITESPACE",
    "CallGrammar",
    "ToolSchema",
    "fields_of",
    "quoted",
    "values_of",
]

GAP = r"/[ \n]{0,4}/"
"""Blanks around a call."""
NAME = r"/[A-Za-z0-9_.\-]{1,128}/"
"""A parameter's name, where the schema does not give it."""
ANY_TEXT = r"/(.|\n)*/"
WHITESPACE = r"[ \t\n\r]{0,20}"
"""JSON allows any amount of white space between tokens, and small models can get lost in it."""

_BLANK = r"/[ \n\t]{0,20}/"
_DEFINITIONS = ("$defs", "definitions")
_MOST_CHARACTERS = 1 << 18
"""Of schemas in one grammar. A tool's definitions are written again for each of its parameters."""


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """What a call of one tool must look like."""

    name: str
    parameters: Mapping[str, Any] | None
    """The schema of its arguments; None: any object."""


@dataclass(slots=True)
class CallGrammar:
    """Writes the parts of a grammar that formats share."""

    tools: Sequence[ToolSchema]
    tag: Callable[[str], str]
    """Markup in a rule: text in quotes, or the special token that it is."""
    parallel: bool = True
    """Whether there may be several calls."""
    other_tokens: str = ""
    """A rule for the special tokens that text may contain; empty if there are none."""
    _in_text: bool = False
    _rules: list[str] = field(default_factory=list)
    _characters: int = 0
    """Of schemas written so far."""

    # For formats

    @property
    def in_text(self) -> bool:
        """Whether text may stand around the calls."""
        return self._in_text

    def opening(self, tag: str) -> str:
        """The tag that begins a stretch of calls, and in a text what stands before it."""
        return self.text_until(tag) if self._in_text else self.tag(tag)

    def text_until(self, tag: str) -> str:
        """Any text, and the tag that ends it."""
        written = self.tag(tag)
        if written.startswith("<"):
            return f"{self.rule(ANY_TEXT)} {written}"
        return self.rule(f"{ANY_TEXT} {written}", lazy=True)

    def more(self, item: str, separator: str = "") -> str:
        """Further items, where several calls may come."""
        return f"({separator} {item})*" if self.parallel else ""

    def each(self, write: Callable[[ToolSchema], str]) -> str:
        """What `write` makes of each tool, as alternatives."""
        return self.rule(" | ".join(map(write, self.tools)))

    def by_name(self, write: Callable[[str, str], str]) -> str:
        """What `write` makes of the name of each tool, in quotes, and its arguments in JSON."""
        return self.each(lambda tool: write(quoted(tool.name), self.arguments(tool)))

    def arguments(self, tool: ToolSchema) -> str:
        """The arguments in JSON."""
        return self.json({"type": "object"} if tool.parameters is None else tool.parameters)

    def json_call(self, key: str) -> str:
        """`{"name": ..., KEY: {...}}` of any tool."""

        def write(name: str, arguments: str) -> str:
            parts = (
                '"{"',
                quoted('"name"'),
                '":"',
                quoted(name),
                '","',
                quoted(f'"{key}"'),
                '":"',
                arguments,
            )
            return f" {_BLANK} ".join((*parts, '"}"'))

        return self.by_name(write)

    def json_list(self, key: str) -> str:
        """A list of such calls."""
        call = self.json_call(key)
        further = self.more(call, f'{_BLANK} "," {_BLANK}')
        return f'"[" {_BLANK} {call} {further} {_BLANK} "]"'

    def json(self, schema: Mapping[str, Any], tool: ToolSchema | None = None) -> str:
        """A value by a schema, a part of that of `tool`. Raises RequestError where the schemas of a request
        become too long."""
        root = (tool.parameters if tool is not None else None) or {}
        whole = {**{key: root[key] for key in _DEFINITIONS if key in root}, **schema}
        text = json.dumps({**whole, "x-guidance": {"whitespace_pattern": WHITESPACE}})
        self._characters += len(text)
        if self._characters > _MOST_CHARACTERS:
            raise RequestError(
                "the JSON schemas of strict tools cannot be used: their grammar has more than "
                f"{_MOST_CHARACTERS:,} characters. A tool's definitions count once for each parameter",
                param="tools",
                code="invalid_grammar",
            )
        return f"%json {text}"

    def typed_text(self, tool: ToolSchema, schema: Mapping[str, Any], closer: str) -> str:
        """A parameter's value as plain text, and `closer`, which ends it."""
        types = types_of(schema, tool.parameters or {})
        if types and "string" not in types:
            return f"{self.json(schema, tool)} {self.tag(closer)}"
        if types and (values := values_of(schema)):
            texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
            return f"({' | '.join(map(quoted, texts))}) {self.tag(closer)}"
        return self.text_until(closer)

    def typed_parameters(self, tool: ToolSchema, write: Callable[[str, str], str], closer: str) -> str:
        """A tool's parameters as plain text, in the order of its schema. `write` takes rules for the name of
        one, and for its value with the end of it."""
        if tool.parameters is None:
            return f"({write(NAME, self.text_until(closer))})*"
        return " ".join(
            f"({write(quoted(name), self.typed_text(tool, schema, closer))})" + "?" * (not required)
            for name, schema, required in fields_of(tool.parameters)
        )

    def sequence(self, items: Iterable[tuple[str, bool]], separator: str) -> str:
        """Items in this order, each (rule, whether it must come), with separators between them."""
        behind, alone = '""', '""'
        for item, required in reversed(list(items)):
            name = self.rule(item)
            if required:
                alone, behind = f"{name} {behind}", f"{separator} {name} {behind}"
            else:
                alone, behind = f"{name} {behind} | {alone}", f"({separator} {name})? {behind}"
            alone, behind = self.rule(alone), self.rule(behind)
        return alone

    def rule(self, body: str, *, lazy: bool = False, name: str | None = None) -> str:
        """The name of a new rule. `lazy`: it matches as little as possible."""
        name = name or f"part{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' * lazy}: {body}")
        return name

    def replace(self, name: str, body: str) -> None:
        """Give a rule that needs its own name another body."""
        at = next(at for at, rule in enumerate(self._rules) if rule.startswith(f"{name}: "))
        self._rules[at] = f"{name}: {body}"

    # Whole grammars

    def instead(self, write: Callable[[CallGrammar], str]) -> str:
        """Return rules of `calls`: only calls. `write` is the format's."""
        call = write(self)
        return "\n".join([f"calls: call {self.more('call', GAP)}", f"call: {call}", *self._rules, ""])

    def within_text(
        self, write: Callable[[CallGrammar], str], start: Callable[[CallGrammar], str] | None
    ) -> str:
        """A grammar of text with calls in it. `start`: the format's own, where calls cannot come anywhere."""
        self._in_text = True
        call = write(self)
        rules = [f"call: {call}", f"rest: {ANY_TEXT}"]
        if self.other_tokens:
            rules.append(f"aside: {ANY_TEXT} {self.other_tokens}")
        if start is not None:
            begins = start(self)
        elif self.parallel:
            begins = "(call | aside)* rest" if self.other_tokens else "call* rest"
        else:
            begins = "aside* (rest | call)" if self.other_tokens else "rest | call"
        rules = [f"start: {begins}", *rules, *self._rules]
        return "\n".join([*rules, ""])


def quoted(text: str) -> str:
    """A literal of a rule."""
    return json.dumps(text, ensure_ascii=False)


def fields_of(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    """(name, schema, whether it must come) of each property; those forbidden are left out."""
    given = schema.get("properties")
    listed = schema.get("required")
    required = {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()
    return [
        (name, part if isinstance(part, Mapping) else {}, name in required)
        for name, part in (given.items() if isinstance(given, Mapping) else ())
        if part is not False
    ]


def values_of(schema: Mapping[str, Any]) -> list[Any]:
    """The only instances, if the schema lists them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else []
