"""The constraints that a request may hold, in this API's fields and in vLLM's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from leadline.protocol.openai import ChatCompletionRequest, CompletionRequest, InvalidBody, decode_body

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def text_request(**fields: Any) -> CompletionRequest:
    return decode_body(json.dumps({"prompt": "p", **fields}).encode(), CompletionRequest)


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "text"}}, None, None),
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
        ),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"guided_choice": ['say "a"', "b"]}, "lark", 'start: "say \\"a\\"" | "b"'),
        ({"structured_outputs": {"choice": ["é"]}}, "lark", 'start: "\\u00e9"'),
        ({"guided_grammar": 'root ::= "a"'}, "lark", 'root ::= "a"'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", 'start: "a"'),
        ({"structured_outputs": {}}, None, None),
    ],
)
def test_every_field_says_what_the_output_must_match(
    fields: dict[str, Any], kind: str | None, value: Any
) -> None:
    found = text_request(**fields).constraint
    if kind is None:
        assert found is None
        return
    assert found is not None
    assert found.kind == kind
    assert (json.loads(found.value) if kind == "json_schema" else found.value) == value
    assert found.param == ".".join(_path(fields))


def _path(fields: dict[str, Any]) -> list[str]:
    ((field, value),) = fields.items()
    return [field, *value] if field == "structured_outputs" else [field]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a", "guided_regex": "b"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_the_fields_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidBody) as caught:
        text_request(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"priority": 0}, "interactive"),
        ({"priority": -5}, "interactive"),
        ({"priority": 1}, "batch"),
        ({"priority": 1, "priority_class": "interactive"}, "interactive"),
    ],
)
def test_a_priority_of_vllm_becomes_a_class(fields: dict[str, Any], expected: str | None) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], **fields}
    assert decode_body(json.dumps(chat).encode(), ChatCompletionRequest).priority_class == expected
