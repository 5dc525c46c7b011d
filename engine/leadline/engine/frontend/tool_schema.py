"""Tools as a request lists them → what the output must look like when a call is required.

Owns the checks on `tools` and `tool_choice`, and the JSON schema that forces a call: for a named tool the
output is its arguments, for "required" a list of `{"name": ..., "parameters": ...}` objects.
`tool_formats.forced` reads both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from leadline.engine.errors import RequestError
from leadline.engine.frontend.tool_formats import FORMATS, CallGrammar, ToolFormat, ToolSchema
from leadline.engine.sampling_params import StructuredSpec
from leadline.protocol.text.prompts import tools_shown
from leadline.protocol.text.tokenizer import Tokenizer

__all__ = ["ToolPlan", "calls_in_text", "known_format", "or_calls", "plan_tools"]


class ToolPlan:
    """What to do about tools in one request.

    Attributes:
        tools: to show the model (None for tool_choice "none").
        names: of all tools given.
        constraint: what the output must match, or None.
        named: the tool the caller insists on, or None.
        parse: whether to look for calls in the output at all.
        schemas: of all tools given; those that are not strict have none.
        parallel: whether the model may make several calls.
    """

    def __init__(
        self,
        tools: list[dict[str, Any]] | None,
        names: tuple[str, ...] = (),
        constraint: StructuredSpec | None = None,
        named: str | None = None,
        schemas: tuple[ToolSchema, ...] = (),
        parallel: bool = True,
    ) -> None:
        self.tools = tools
        self.schemas = schemas
        self.parallel = parallel
        self.names = names
        self.constraint = constraint
        self.named = named
        self.parse = bool(tools)

    @property
    def is_free(self) -> bool:
        """Whether the model may call tools in its own form, or not call any."""
        return self.parse and self.constraint is None


def plan_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None = None,
    *,
    parallel_tool_calls: bool = True,
) -> ToolPlan:
    """Check both fields against each other. tool_choice: none, auto (the default with tools), required, or
    `{"type": "function", "function": {"name": ...}}`. Raises RequestError naming the field."""
    schemas = [_parameters(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())]
    names = tuple(name for name, _ in schemas)
    if len(set(names)) < len(names):
        raise RequestError("tools must not name a function twice", param="tools")
    if tool_choice in (None, "auto", "none"):
        shown = tools_shown(tools, tool_choice)
        strict = tuple(
            ToolSchema(name, schema if tool["function"].get("strict") else None)
            for tool, (name, schema) in zip(tools or (), schemas, strict=True)
        )
        return ToolPlan(
            None if shown is None else [dict(tool) for tool in shown],
            names,
            schemas=strict,
            parallel=parallel_tool_calls,
        )
    if not tools:
        raise RequestError("tool_choice needs tools to choose from", param="tool_choice")
    given = [dict(tool) for tool in tools]
    if tool_choice == "required":
        return ToolPlan(given, names, _list_schema(schemas, parallel_tool_calls))
    named = _named(tool_choice)
    if named not in names:
        raise RequestError(f"tool_choice names {named!r}, which is not in tools", param="tool_choice")
    schema = json.dumps(dict(schemas)[named])
    spec = StructuredSpec(kind="json_schema", value=schema, param="tools")
    return ToolPlan(given, names, spec, named)


def known_format(plan: ToolPlan, tool_format: ToolFormat | None) -> ToolFormat | None:
    """The format to read calls in, None where none is read. Raises RequestError where the model may write
    calls in a form that is not known."""
    if not plan.is_free:
        return None
    if tool_format is None:
        names = ", ".join(sorted(each.name for each in FORMATS))
        raise RequestError(
            "tools: this model's chat template asks for calls in a form that is not known. Set tool_choice "
            f'to "required" or "none", or start the engine with --tool-format NAME; known are {names}',
            param="tools",
            code="unknown_tool_format",
        )
    return tool_format


def or_calls(
    spec: StructuredSpec, plan: ToolPlan, tool_format: ToolFormat, tokenizer: Tokenizer
) -> StructuredSpec:
    """`spec`, or calls of the tools in the model's own markup. What does not constrain JSON stays as it
    is."""
    if spec.kind not in ("json_object", "json_schema"):
        return spec
    grammar = _grammar(plan, tool_format, tokenizer)
    return msgspec.structs.replace(spec, calls=grammar.instead(tool_format.rules))


def calls_in_text(plan: ToolPlan, tool_format: ToolFormat, tokenizer: Tokenizer) -> StructuredSpec | None:
    """Text that is free until a call begins, and calls that match the schemas of strict tools. None where no
    tool is strict."""
    if all(schema.parameters is None for schema in plan.schemas):
        return None
    grammar = _grammar(plan, tool_format, tokenizer)
    return StructuredSpec("lark", grammar.within_text(tool_format.rules, tool_format.start), param="tools")


def _grammar(plan: ToolPlan, tool_format: ToolFormat, tokenizer: Tokenizer) -> CallGrammar:
    def tag(text: str) -> str:
        token_id = tokenizer.token_id(text)
        return (
            f"<[{token_id}]>" if token_id in tokenizer.special_ids else json.dumps(text, ensure_ascii=False)
        )

    markup = {tokenizer.token_id(text) for text in tool_format.tags}
    others = sorted(tokenizer.special_ids - markup - set(tokenizer.eos_token_ids))
    other_tokens = f"<[{','.join(map(str, others))}]>" if others else ""
    return CallGrammar(plan.schemas, tag, parallel=plan.parallel, other_tokens=other_tokens)


def _named(tool_choice: str | Mapping[str, Any] | None) -> str:
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(
            'tool_choice must be "none", "auto", "required" or '
            '{"type": "function", "function": {"name": "..."}}',
            param="tool_choice",
        )
    return name


def _parameters(tool: Mapping[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """(name, JSON schema of the arguments) of one tool."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise RequestError(
            f'{where} must be {{"type": "function", "function": {{"name": ...}}}}', param=where
        )
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping):
        raise RequestError(
            f"{where}.function.parameters must be a JSON schema", param=f"{where}.function.parameters"
        )
    return name, {
        "type": "object",
        **schema,
    }  # arguments are an object, also where the schema does not say so


def _list_schema(schemas: Sequence[tuple[str, dict[str, Any]]], parallel: bool) -> StructuredSpec:
    """A list of calls. Each tool's schema becomes a definition with an `$id`, so that its references stay
    within it."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/tool{i}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for i, (name, _) in enumerate(schemas)
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": calls},
        "$defs": {
            f"tool{i}": {"$id": f"leadline:tool{i}", **schema} for i, (_, schema) in enumerate(schemas)
        },
    }
    if not parallel:
        schema["maxItems"] = 1
    return StructuredSpec(kind="json_schema", value=json.dumps(schema), param="tools")
