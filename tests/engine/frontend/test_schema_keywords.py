"""Each keyword of JSON Schema is enforced or refused by name, and schemas of real clients are taken."""

from __future__ import annotations

import json

import pytest
from agent_schemas import SCHEMAS

from leadline.engine.errors import RequestError
from leadline.engine.frontend.structured import GrammarCompiler
from leadline.engine.frontend.tool_formats import format_named
from leadline.engine.frontend.tool_schema import calls_in_text, plan_tools
from leadline.engine.sampling_params import StructuredSpec

INTEGER, TEXT, OBJECT = {"type": "integer"}, {"type": "string"}, {"type": "object"}
TWO = {"a": INTEGER, "b": TEXT}


@pytest.fixture(scope="module")
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def takes(compiler: GrammarCompiler, tokenizer, spec: StructuredSpec, text: str) -> bool:
    matcher = compiler.matcher(spec)
    return all(matcher.accept(token_id) for token_id in tokenizer.encode(text)) and matcher.accept(2)


def schema(value: object) -> StructuredSpec:
    return StructuredSpec("json_schema", json.dumps(value))


ENFORCED = [
    ({"type": ["integer", "null"]}, "null", '"a"'),
    ({"enum": ["a", 1]}, "1", "2"),
    ({"const": {"a": [1]}}, '{"a": [1]}', '{"a": [2]}'),
    ({"enum": [1, 5], "minimum": 3}, "5", "1"),
    ({"enum": ["ab", "b"], "pattern": "^a"}, '"ab"', '"b"'),
    ({"enum": [{"a": 1}, {"b": 1}], "required": ["a"]}, '{"a": 1}', '{"b": 1}'),
    ({"enum": [[1], ["a"]], "items": INTEGER}, "[1]", '["a"]'),
    ({"type": "integer", "multipleOf": 5}, "15", "16"),
    ({"multipleOf": 5}, "15", "16"),
    ({"type": "number", "multipleOf": 3, "minimum": 4}, "6", "3"),
    ({"maximum": 5}, "5", "6"),
    ({"type": "number", "exclusiveMaximum": 5}, "4.9", "5"),
    ({"type": "integer", "maximum": 5, "exclusiveMaximum": True}, "4", "5"),
    ({"type": "string", "minLength": 2, "maxLength": 3}, '"abc"', '"abcd"'),
    ({"pattern": "b"}, '"abc"', '"ac"'),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aa"', '"aaa"'),
    ({"type": "string", "format": "date", "pattern": "^2026"}, '"2026-01-01"', '"2025-01-01"'),
    ({"type": "array", "prefixItems": [INTEGER], "items": False}, "[1]", "[1, 2]"),
    ({"type": "array", "minItems": 2, "maxItems": 2}, "[1, 2]", "[1]"),
    ({**OBJECT, "required": ["k"], "additionalProperties": INTEGER}, '{"k": 1}', '{"k": "a"}'),
    ({**OBJECT, "properties": TWO}, '{"a": 1, "c": 2}', '{"c": 2, "a": "x"}'),
    ({**OBJECT, "patternProperties": {"^x": INTEGER}}, '{"y": "a", "x1": 1}', '{"x1": "a"}'),
    (
        {**OBJECT, "properties": {"xa": TEXT}, "patternProperties": {"^x": {"minLength": 3}}},
        '{"xa": "abc"}',
        '{"xa": "a"}',
    ),
    (
        {**OBJECT, "properties": {"n": TEXT}, "patternProperties": {"^S_": TEXT, "^I_": INTEGER}},
        '{"n": "a", "S_1": "x", "I_1": 1}',
        '{"I_1": "s"}',
    ),
    ({**OBJECT, "patternProperties": {"^x": INTEGER}, "additionalProperties": False}, '{"x": 1}', '{"y": 1}'),
    ({**OBJECT, "minProperties": 1, "maxProperties": 1}, '{"a": 1}', "{}"),
    ({**OBJECT, "propertyNames": {"maxLength": 2}}, '{"ab": 1}', '{"abc": 1}'),
    ({**OBJECT, "properties": TWO, "propertyNames": {"pattern": "^[ac]"}}, '{"a": 1, "c": 1}', '{"b": "x"}'),
    ({**OBJECT, "properties": TWO, "propertyNames": {"enum": ["a", "c"]}}, '{"a": 1, "c": 2}', '{"b": "x"}'),
    ({**OBJECT, "dependentRequired": {"a": ["b"]}}, '{"a": 1, "b": 1}', '{"a": 1}'),
    ({**OBJECT, "properties": TWO, "dependencies": {"a": ["b"]}}, '{"b": "x"}', '{"a": 1}'),
    ({**OBJECT, "dependentSchemas": {"a": {"required": ["b"]}}}, '{"a": 1, "b": 1}', '{"a": 1}'),
    (
        {"allOf": [{**OBJECT, "properties": {"a": INTEGER}}], "additionalProperties": False},
        "{}",
        '{"a": 1}',
    ),
    (
        {"allOf": [{"properties": {"a": INTEGER}, "required": ["a"]}, {**OBJECT, "required": ["b"]}]},
        '{"a": 1, "b": 2}',
        '{"a": 1}',
    ),
    ({"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 1}]}, "6", "3"),
    ({**OBJECT, "properties": TWO, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"a": 1}', "{}"),
    ({"anyOf": [INTEGER, TEXT], "oneOf": [{"const": 1}, {"const": "a"}]}, "1", "2"),
    ({"$ref": "#/$defs/i", "minimum": 5, "$defs": {"i": INTEGER}}, "5", "4"),
    ({"$ref": "#/$defs/any", "anyOf": [INTEGER], "$defs": {"any": True}}, "5", '"a"'),
    ({"not": {"type": "string"}}, "2", '"a"'),
    ({"type": ["integer", "string"], "not": {"type": "number"}}, '"a"', "1"),
    ({"enum": [1, 2, True], "not": {"const": 1}}, "true", "1"),
    ({**OBJECT, "properties": TWO, "not": {"required": ["a"]}}, '{"b": "x"}', '{"a": 1}'),
    ({"anyOf": [{"not": {}}, TEXT]}, '"a"', "1"),
    ({**OBJECT, "properties": {"a": {"type": "integer", "required": True}}}, '{"a": 1}', "{}"),
    ({"type": "integer", "divisibleBy": 2}, "2", "3"),
    ({"extends": INTEGER}, "2", '"a"'),
]


@pytest.mark.parametrize(("value", "good", "bad"), ENFORCED, ids=lambda value: json.dumps(value)[:70])
def test_a_keyword_is_enforced(compiler, tokenizer, value, good, bad):
    assert takes(compiler, tokenizer, schema(value), good)
    assert not takes(compiler, tokenizer, schema(value), bad)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": INTEGER, "minContains": 2}, "contains"),
        ({"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False}, "unevaluatedItems"),
        ({"allOf": [{"properties": TWO}], "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({**OBJECT, "patternProperties": {"^x": TEXT, "y$": TEXT}}, "patternProperty regexes"),
        ({**OBJECT, "propertyNames": {"format": "uuid"}}, "propertyNames"),
        ({**OBJECT, "propertyNames": {"maxLength": 5_000_000_000}}, "propertyNames"),
        ({**OBJECT, "dependentSchemas": {"a": {"required": 5}}}, "required must be a list"),
        ({**OBJECT, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, '"if", "then"'),
        ({"type": "integer", "not": {"minimum": 3}}, "not"),
        ({"$dynamicRef": "#i", "$defs": {"i": {"$dynamicAnchor": "i"}}}, "dynamicRef"),
        ({"$recursiveRef": "#"}, "recursiveRef"),
        ({"type": "string", "pattern": "^(?!a)"}, "look-around"),
        ({"type": "string", "pattern": r"^(a)\1$"}, "backreferences"),
        ({"disallow": "string"}, "disallow"),
        ({**OBJECT, "dependentRequired": {f"a{i}": ["b"] for i in range(20)}}, "dependentRequired"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_cannot_be_enforced_is_refused_by_name(compiler, value, named):
    with pytest.raises(RequestError, match=named) as refused:
        compiler.validate(schema(value))
    assert refused.value.code == "invalid_grammar"


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_of_agents_and_mcp_servers_are_enforced(compiler, tokenizer, name):
    parameters, good, bad = SCHEMAS[name]
    tool = {"type": "function", "function": {"name": "tool", "parameters": parameters, "strict": True}}
    named = plan_tools([tool], {"type": "function", "function": {"name": "tool"}}).constraint
    assert takes(compiler, tokenizer, named, json.dumps(good))
    assert not takes(compiler, tokenizer, named, json.dumps(bad))
    forced = plan_tools([tool], "required").constraint
    assert takes(compiler, tokenizer, forced, json.dumps([{"name": "tool", "parameters": good}]))
    assert not takes(compiler, tokenizer, forced, json.dumps([{"name": "tool", "parameters": bad}]))
    free = calls_in_text(plan_tools([tool]), format_named("hermes"), tokenizer)
    for arguments, wanted in ((good, True), (bad, False)):
        call = f"<tool_call>\n{json.dumps({'name': 'tool', 'arguments': arguments})}\n</tool_call>"
        assert takes(compiler, tokenizer, free, f"Well. {call}") is wanted
    for other in ("qwen3_coder", "gemma4", "pythonic"):
        compiler.validate(calls_in_text(plan_tools([tool]), format_named(other), tokenizer))


def test_a_strict_tool_whose_schema_cannot_be_enforced_is_refused_by_its_keyword(compiler, tokenizer):
    parameters = {**OBJECT, "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "tool", "parameters": parameters, "strict": True}}
    with pytest.raises(RequestError, match=r"JSON schema of a tool.*uniqueItems") as refused:
        compiler.validate(calls_in_text(plan_tools([tool]), format_named("hermes"), tokenizer))
    assert refused.value.param == "tools"
    assert "part0" not in refused.value.message
