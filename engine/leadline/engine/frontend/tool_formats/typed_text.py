"""Parameters that a model writes as plain text → JSON, by the types in the tool's schema.

A text whose parameter is a string stays as it is. For other types the text is read as JSON, or as Python
writes it (`True`, `{'a': 1}`). What is neither becomes a string: the tool can tell what is wrong with it.
Without a type in the schema, JSON is taken as JSON and all else as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from leadline.engine.frontend.tool_formats.json_calls import NUMBER
from leadline.engine.frontend.tool_formats.literals import PYTHON, convert
from leadline.engine.frontend.tool_formats.parser import Broken, CallParser, Steps

__all__ = ["ToolTypes", "TypedArguments", "to_json", "types_of"]

_KNOWN = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))
_TEXT = frozenset(("string",))
_MAX_DEPTH = 8
_NULLS = frozenset(("null", "None"))


class ToolTypes:
    """The types of the parameters of a request's tools."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def of(self, tool: str, parameter: str) -> frozenset[str]:
        """JSON types that the parameter may have; empty if the schema does not say."""
        schema = self._schemas.get(tool)
        if not isinstance(schema, Mapping):
            return frozenset()
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and parameter in properties:
            return types_of(properties[parameter], schema)
        return types_of(schema.get("additionalProperties"), schema)


class TypedArguments:
    """Arguments of one call that has begun, written parameter by parameter."""

    def __init__(self, parser: CallParser, types: ToolTypes, tool: str) -> None:
        self._parser = parser
        self._types = types
        self._tool = tool
        self._any = False

    def read(self, parameter: str, *closers: str) -> Steps[str]:
        """Read the text of a parameter up to one of `closers`, which is read and returned. A string goes out
        as it comes."""
        parser = self._parser
        types = self._types.of(self._tool, parameter)
        parser.arguments(f"{', ' if self._any else '{'}{json.dumps(parameter, ensure_ascii=False)}: ")
        self._any = True
        if types == _TEXT:
            parser.arguments('"')
            closer = yield from parser.pass_until(self._give_text, *closers)
            parser.arguments('"')
            return closer
        held: list[str] = []
        try:
            closer = yield from parser.pass_until(held.append, *closers)
        except Broken:
            if held:
                parser.arguments(to_json("".join(held), types))
            raise
        parser.arguments(to_json("".join(held), types))
        return closer

    def end(self) -> None:
        """All parameters were read."""
        self._parser.arguments("}" if self._any else "{}")

    def _give_text(self, piece: str) -> None:
        self._parser.arguments(json.dumps(piece, ensure_ascii=False)[1:-1])


def to_json(text: str, types: frozenset[str]) -> str:
    """JSON text of a parameter that may have these types (any if empty)."""
    if types != _TEXT:
        bare = text.strip()
        if bare in _NULLS and "null" in types:
            return "null"
        if "boolean" in types and bare in ("True", "False"):
            return bare.lower()
        form = _json(bare)
        if form is None and bare[:1] in ("{", "[", "("):
            form = convert(bare, PYTHON)
        if form is not None and _fits(form, types):
            return form
        whole = bare.removesuffix(".0")
        if "integer" in types and whole != bare and NUMBER.fullmatch(whole):
            return whole
    return json.dumps(text, ensure_ascii=False)


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """JSON types that an instance of `schema` may have, a part of `root`; empty if it does not say."""
    return _types_of(schema, root, {}, 0)


def _types_of(
    schema: Any, root: Mapping[str, Any], named: dict[str, frozenset[str]], depth: int
) -> frozenset[str]:
    """`named`: the types behind references, each of which is followed once."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in named:
            named[reference] = frozenset()  # a reference within itself says nothing
            named[reference] = _types_of(_at(root, reference), root, named, depth + 1)
        return named[reference]
    given = schema.get("type")
    if isinstance(given, str) or (isinstance(given, list) and given):
        types = frozenset([given] if isinstance(given, str) else map(str, given))
        return types if types <= _KNOWN else frozenset()
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(map(_type_of, values))
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list) and options:
            each = [_types_of(option, root, named, depth + 1) for option in options]
            return frozenset().union(*each) if all(each) else frozenset()
    if isinstance(parts := schema.get("allOf"), list):
        each = [_types_of(part, root, named, depth + 1) for part in parts]
        return next((types for types in each if types), frozenset())
    return frozenset()


def _at(root: Mapping[str, Any], reference: str) -> Any:
    """What a pointer within the schema names, or None."""
    value: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        value = value.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(value, Mapping) else None
    return value if reference.startswith("#") else None


def _json(text: str) -> str | None:
    """The text if it is JSON, but for a string in quotes: those would belong to the text."""
    try:
        if text[:1] == '"' or (text[:1] not in "{[" and len(text) > 1024):
            return None
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return text


def _refuse(word: str) -> None:
    raise ValueError(word)


def _fits(form: str, types: frozenset[str]) -> bool:
    if not types:
        return True
    kind = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}.get(form[0], "number")
    if kind == "number":
        return "number" in types or ("integer" in types and form.lstrip("-").isdecimal())
    return kind in types


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) else "number"
    return {str: "string", dict: "object", list: "array"}.get(type(value), "null")
