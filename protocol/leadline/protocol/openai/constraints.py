"""Constraints on the form of the output, in the fields of this API and in those of vLLM.

`constraint_of` reads all of them: a request may hold one.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

__all__ = [
    "Choices",
    "Constraint",
    "JsonObjectFormat",
    "JsonSchema",
    "JsonSchemaFormat",
    "ResponseFormat",
    "StructuredOutputs",
    "TextFormat",
    "constraint_of",
]

Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=10_000)]
"""Texts of which the output is one."""


class TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    """No constraint."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object", kw_only=True):
    """Any JSON object."""

    schema: dict[str, Any] | None = None
    """Extension, as other servers have it: a JSON Schema, as with `json_schema`."""


class JsonSchema(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    """A JSON Schema; absent: any JSON object."""
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", kw_only=True):
    """JSON that validates against a schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's field: one of the first five."""

    json: dict[str, Any] | str | None = None
    """A JSON Schema, or the text of one."""
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    """In llguidance's Lark dialect, or in GBNF."""
    json_object: bool | None = None

    # Refused: they would change the output.
    structural_tag: None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None


class Constraint(msgspec.Struct, frozen=True):
    """What the whole output must match."""

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    value: str
    """The schema as JSON text, the regular expression or the grammar; empty for json_object."""
    param: str
    """The field of the request."""


def constraint_of(request: Any) -> Constraint | None:
    """Return the constraint of a GenerationRequest. Raises ValueError, which names the field as msgspec's
    errors do, where there are several or a schema is not the text of a JSON object."""
    found: list[Constraint] = []

    def add_schema(schema: dict[str, Any] | str | None, param: str) -> None:
        if schema is not None:
            text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
            found.append(Constraint("json_schema", _object_text(text, param), param))

    def add(kind: Literal["regex", "lark"], value: str | None, param: str) -> None:
        if value is not None:
            found.append(Constraint(kind, value, param))

    match request.response_format:
        case JsonObjectFormat(schema=None) | JsonSchemaFormat(json_schema=JsonSchema(schema=None)):
            found.append(Constraint("json_object", "", "response_format"))
        case JsonObjectFormat(schema=schema) | JsonSchemaFormat(json_schema=JsonSchema(schema=schema)):
            add_schema(schema, "response_format")
    add("regex", request.regex, "regex")
    add("lark", request.grammar, "grammar")
    add_schema(request.guided_json, "guided_json")
    add("regex", request.guided_regex, "guided_regex")
    add("lark", _one_of(request.guided_choice), "guided_choice")
    add("lark", request.guided_grammar, "guided_grammar")
    if (structured := request.structured_outputs) is not None:
        add_schema(structured.json, "structured_outputs.json")
        add("regex", structured.regex, "structured_outputs.regex")
        add("lark", _one_of(structured.choice), "structured_outputs.choice")
        add("lark", structured.grammar, "structured_outputs.grammar")
        if structured.json_object:
            found.append(Constraint("json_object", "", "structured_outputs.json_object"))
    if len(found) > 1:
        names = " and ".join(one.param for one in found[:2])
        raise ValueError(f"Expected one constraint of the output, got {names} - at `$.{found[1].param}`")
    return found[0] if found else None


def _one_of(choices: list[str] | None) -> str | None:
    """The grammar of one of these texts."""
    if choices is None:
        return None
    return "start: " + " | ".join(json.dumps(choice) for choice in choices)


def _object_text(text: str, param: str) -> str:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise ValueError(f"Expected the JSON text of a schema, an object - at `$.{param}`")
    return text
