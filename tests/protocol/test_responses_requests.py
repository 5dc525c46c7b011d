"""Requests of /v1/responses, and the chats that they stand for."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from leadline.protocol.errors import RequestError
from leadline.protocol.openai import InvalidBody, decode_body
from leadline.protocol.responses import ResponsesRequest, in_words_of_responses

CALL = {"type": "function_call", "call_id": "c1", "name": "go", "arguments": '{"n":1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "done"}
GO = {
    "type": "function",
    "name": "go",
    "description": "Go.",
    "parameters": {"type": "object"},
    "strict": True,
}

IMAGE = {"type": "input_image", "image_url": "x"}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}


def request(**fields: Any) -> ResponsesRequest:
    return decode_body(json.dumps({"input": "Hi", **fields}).encode(), ResponsesRequest)


def messages(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = msgspec.to_builtins(request(input=list(items), **fields).chat().messages)
    return plain


def test_a_text_is_the_message_of_a_user_and_instructions_are_the_system_message() -> None:
    assert msgspec.to_builtins(request(instructions="Be brief.").chat().messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_leading_system_and_developer_messages_join_the_instructions() -> None:
    assert messages(
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "No jokes."}]},
        {"role": "user", "content": "a"},
        {"role": "developer", "content": "Now jokes."},
        instructions="Be brief.",
    ) == [
        {"role": "system", "content": "Be brief.\n\nNo jokes."},
        {"role": "user", "content": "a"},
        {"role": "developer", "content": "Now jokes."},
    ]


def test_items_of_an_earlier_answer_are_one_message_of_the_assistant() -> None:
    assert messages(
        {"role": "user", "content": "a"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "I go.", "annotations": [], "logprobs": []},
                {"type": "refusal", "refusal": "But not far."},
            ],
        },
        CALL,
        {**CALL, "call_id": "c2"},
        OUTPUT,
        {**OUTPUT, "call_id": "c2", "output": [{"type": "input_text", "text": "there"}]},
        {"type": "function_call", "call_id": "c3", "name": "go", "arguments": "{}"},
    ) == [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "I go.\nBut not far.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": call_id, "type": "function", "function": {"name": "go", "arguments": '{"n":1}'}}
                for call_id in ("c1", "c2")
            ],
        },
        {"role": "tool", "content": "done", "tool_call_id": "c1"},
        {"role": "tool", "content": "there", "tool_call_id": "c2"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c3", "type": "function", "function": {"name": "go", "arguments": "{}"}}],
        },
    ]


def test_a_summary_stands_in_for_reasoning_that_is_not_there() -> None:
    thought = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Short."}]}
    assert messages({"role": "user", "content": "a"}, thought, CALL)[1]["reasoning_content"] == "Short."
    assert messages(thought, {"role": "user", "content": "a"}) == [{"role": "user", "content": "a"}]


def test_all_reasoning_of_a_turn_stays_in_its_message() -> None:
    first, second = (
        {"type": "reasoning", "id": text, "content": [{"type": "reasoning_text", "text": text}]}
        for text in ("First.", "Second.")
    )
    said = {"role": "assistant", "content": "I go."}
    turn, _, after = messages(first, said, second, CALL, OUTPUT, {"role": "assistant", "content": "Done."})
    assert turn["reasoning_content"] == "First.\n\nSecond."
    assert "reasoning_content" not in after


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([{"type": "web_search_call", "id": "ws_1"}], "input[0].type"),
        ([{"role": "robot", "content": "a"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{}], "input[0].role"),
        (
            [{"role": "user", "content": [IMAGE]}],
            "input[0].content[0].type",
        ),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([OUTPUT], "input[0].call_id"),
        ([CALL, {**OUTPUT, "call_id": "other"}], "input[1].call_id"),
        ([CALL, {**OUTPUT, "output": None}], "input[1].output"),
        ([{**CALL, "name": None}], "input[0].name"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0]"),
        ([{"id": "msg_1"}], "input[0]"),
        ([], "input"),
        ([{"type": "reasoning", "id": "r", "summary": []}], "input"),
    ],
)
def test_bad_items_are_refused_by_name(items: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(InvalidBody) as refused:
        request(input=items).chat()
    assert refused.value.param == param


def test_a_reference_without_a_store_says_what_to_send_or_to_set() -> None:
    with pytest.raises(InvalidBody, match=r"store: false.*responses\.store_seconds"):
        request(input=[{"type": "item_reference", "id": "msg_1"}]).chat()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["text"]}, "input[0]"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}, "tools": [{"type": "web_search"}]}, "tool_choice.type"),
        ({"tool_choice": {"type": "function", "name": "come"}, "tools": [GO]}, "tool_choice.name"),
        (
            {
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]},
                "tools": [GO],
            },
            "tool_choice.tools",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"answer_id": "a\nb"}, "answer_id"),
    ],
)
def test_bad_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidBody) as refused:
        request(**fields).chat()
    assert refused.value.param == param


def test_tools_of_other_types_are_skipped_and_named() -> None:
    skipped = [
        {"type": "web_search"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        {"type": "namespace", "name": "files", "tools": [GO]},
        {"type": "image_generation"},
        {"type": "odd\nname"},
    ]
    chat = request(tools=[*skipped[:2], GO, *skipped[2:]], tool_choice="auto").chat()
    assert msgspec.to_builtins(chat.tools) == [
        {
            "type": "function",
            "function": {
                "name": "go",
                "description": "Go.",
                "parameters": {"type": "object"},
                "strict": True,
            },
        }
    ]
    assert chat.skipped == (
        "tools[0] web_search",
        "tools[1] custom.apply_patch",
        "tools[3] namespace.files",
        "tools[4] image_generation",
        "tools[5]",
    )
    assert request(tools=skipped).chat().tools is None


def test_choices_and_formats_are_those_of_the_chat() -> None:
    named = request(tools=[GO], tool_choice={"type": "function", "name": "go"}).chat()
    assert msgspec.to_builtins(named.tool_choice) == {"type": "function", "function": {"name": "go"}}
    allowed = request(
        tools=[GO, {**GO, "name": "stop"}],
        tool_choice={
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "stop"}, {"type": "web_search"}],
        },
    ).chat()
    assert (
        allowed.tool_choice,
        [tool["function"]["name"] for tool in msgspec.to_builtins(allowed.tools)],
    ) == (
        "required",
        ["stop"],
    )
    schema = {"type": "object"}
    shaped = request(
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    ).chat()
    assert msgspec.to_builtins(shaped.response_format) == {
        "type": "json_schema",
        "json_schema": {"name": "n", "description": None, "schema": schema, "strict": True},
    }
    assert request(text={"format": {"type": "text"}, "verbosity": "low"}).chat().response_format is None


def test_other_fields_reach_the_chat() -> None:
    body = request(
        model="m",
        stream=True,
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_logprobs=2,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        parallel_tool_calls=False,
        safety_identifier="me",
        prompt_cache_key="dialogue",
        seed=3,
        stop="x",
        cache_salt="s",
        deadline=2.0,
        truncation="auto",
    )
    chat = body.chat()
    assert (chat.model, chat.stream, chat.max_completion_tokens, chat.temperature) == ("m", True, 7, 0.5)
    assert (chat.top_p, chat.logprobs, chat.top_logprobs) == (0.9, True, 2)
    assert (chat.parallel_tool_calls, chat.user, chat.seed) == (False, "me", 3)
    assert (chat.stop, chat.cache_salt, chat.deadline) == ("x", "s", 2.0)
    assert chat.reasoning_effort is None
    assert body.session == "dialogue"
    assert body.not_honoured == ["truncation"]


def test_effort_and_budget_reach_the_chat() -> None:
    chat = request(reasoning={"effort": "low"}, thinking_budget=9).chat()
    assert (chat.reasoning_effort, chat.thinking_budget) == ("low", 9)
    assert request(reasoning={"effort": "max"}).chat().reasoning_effort == "xhigh"


def test_refusals_of_the_chat_name_the_fields_of_the_request() -> None:
    long = in_words_of_responses(RequestError("messages are too long", param="messages"))
    assert (long.message, long.param) == ("input are too long", "input")
    assert in_words_of_responses(RequestError("no", param="response_format")).param == "text.format"
    assert in_words_of_responses(RequestError("no", param="messages[3].content")).param == "input"
    assert in_words_of_responses(RequestError("no", param="seed")).param == "seed"
