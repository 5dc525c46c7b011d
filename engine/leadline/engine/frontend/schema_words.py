"""Keywords of JSON Schema, and those that are rewritten before a schema is read.

`say_otherwise` rewrites keywords that llguidance lacks and those of older drafts:

    not: {}, not: {type}, not: {required: [a]}, not beside enum      other types, values and properties
    dependentRequired, dependentSchemas, dependencies                anyOf: no such property, or the rest too
    divisibleBy, extends, required: true in a property               draft 3: multipleOf, allOf, required
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["NOTES", "SchemaError", "children", "demand", "same", "say_otherwise", "type_of"]

_MAPS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
"""Keywords that map names to schemas."""
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SINGLE = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
NOTES = frozenset({"$comment", "title", "description", "default", "examples", "deprecated"})
"""Keywords that constrain nothing."""
_TYPES = ("array", "boolean", "null", "number", "object", "string")
_MOST_DEPENDENCIES = 8
"""Each doubles the forms of an object; a schema with more is refused by name."""


class SchemaError(ValueError):
    """The message says what in the schema cannot be used."""


def say_otherwise(root: dict[str, Any]) -> None:
    """Rewrite a schema and all below it in place, meaning the same. Raises SchemaError."""
    stack: list[Any] = [root]
    while stack:
        schema = stack.pop()
        if not isinstance(schema, dict):
            continue
        _draft_3(schema)
        _negation(schema)
        _dependencies(schema)
        stack += [child for _, child in children(schema)]


def children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(keyword, schema) of each schema right below."""
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            yield from ((key, child) for child in value.values())
        elif (key in _LISTS or key == "items") and isinstance(value, list):
            yield from ((key, child) for child in value)
        elif key in _SINGLE:
            yield key, value


def type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return {str: "string", dict: "object", list: "array"}.get(type(value), "null")


def same(one: Any, other: Any) -> bool:
    """JSON's equality: true is not 1."""
    return type_of(one) == type_of(other) and one == other


def _draft_3(schema: dict[str, Any]) -> None:
    if "disallow" in schema:
        raise SchemaError("disallow is not supported; say with type what is allowed")
    if isinstance(step := schema.pop("divisibleBy", None), int | float):
        schema.setdefault("multipleOf", step)
    if "extends" in schema:
        base = schema.pop("extends")
        for part in base if isinstance(base, list) else [base]:
            demand(schema, part)
    properties = schema.get("properties")
    for name, part in properties.items() if isinstance(properties, dict) else ():
        if isinstance(part, dict) and isinstance(part.get("required"), bool) and part.pop("required"):
            required = schema.get("required")
            schema["required"] = [*(required if isinstance(required, list) else []), name]


def _negation(schema: dict[str, Any]) -> None:
    rule = schema.get("not")
    if rule is True or (isinstance(rule, dict) and not rule.keys() - NOTES):
        del schema["not"]
        schema["enum"] = []
        return
    if not isinstance(rule, dict):
        return
    said = rule.keys() - NOTES
    values, required = schema.get("enum"), rule.get("required")
    if said == {"type"}:
        given = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
        now = schema.get("type", list(_TYPES))
        if "integer" not in given and all(name in _TYPES for name in given):
            # A number that is an integer is a number.
            kept = [
                name
                for name in (now if isinstance(now, list) else [now])
                if name not in given and not (name == "integer" and "number" in given)
            ]
            del schema["not"]
            schema.update({"type": kept} if kept else {"enum": []})
    elif said in ({"const"}, {"enum"}) and isinstance(values, list):
        excluded = [rule["const"]] if "const" in rule else rule["enum"]
        if isinstance(excluded, list):
            del schema["not"]
            schema["enum"] = [value for value in values if not any(same(value, one) for one in excluded)]
    elif said == {"required"} and schema.get("type", "object") == "object":
        properties = schema.get("properties", {})
        if isinstance(required, list) and len(required) == 1 and isinstance(properties, dict):
            del schema["not"]
            schema["type"] = "object"
            schema["properties"] = {**properties, str(required[0]): False}


def _dependencies(schema: dict[str, Any]) -> None:
    given = [schema.get(key) for key in _DEPENDENT]
    rules = [rule for rule in given if isinstance(rule, dict)]
    if any(rule is not None and not isinstance(rule, dict) for rule in given):
        return
    if not 0 < sum(map(len, rules)) <= _MOST_DEPENDENCIES:
        return
    for key in _DEPENDENT:
        schema.pop(key, None)
    for rule in rules:
        for name, then in rule.items():
            more = {"required": then} if isinstance(then, list) else then
            if isinstance(more, dict) and "additionalProperties" not in more:
                # Listed, so that they come in this order.
                required, properties = more.get("required", []), more.get("properties", {})
                if not isinstance(required, list) or not isinstance(properties, dict):
                    raise SchemaError("required must be a list of names, and properties an object")
                names = [name, *(one for one in required if isinstance(one, str))]
                more = {**more, "properties": {**dict.fromkeys(names, True), **properties}}
            demand(schema, {"anyOf": [{"properties": {name: False}}, more]})


_DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")


def demand(schema: dict[str, Any], more: Any) -> None:
    """Ask for `more` beside what a schema asks for."""
    parts = schema.get("allOf")
    schema["allOf"] = [*(parts if isinstance(parts, list) else []), more]
