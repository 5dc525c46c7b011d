"""Messages requests: what real clients send becomes a chat, what is wrong is refused by its field's name."""

import json
from typing import Any

import pytest

from leadline.protocol.anthropic.request import CountTokensRequest, MessagesRequest
from leadline.protocol.openai import ChatCompletionRequest, InvalidBody, decode_body
from leadline.protocol.openai.body import encode_body

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
TOOL = {"name": "weather", "description": "Of a city.", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20260318", "name": "web_search", "max_uses": 5}
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "18 degrees"}
THOUGHT = {"type": "thinking", "thinking": "Rome is warm.", "signature": "c2ln"}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def ask(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def say(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def request(**fields: Any) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 16, "messages": HI} | fields
    return decode_body(json.dumps(body).encode(), MessagesRequest)


def chat(**fields: Any) -> ChatCompletionRequest:
    made = request(**fields).chat()
    # It is one that a client could have sent.
    decode_body(encode_body(made), ChatCompletionRequest)
    return made


def messages(**fields: Any) -> list[dict[str, Any]]:
    return json.loads(encode_body(chat(**fields)))["messages"]


def refused(**fields: Any) -> InvalidBody:
    with pytest.raises(InvalidBody) as caught:
        request(**fields).chat()
    return caught.value


def test_tools_that_the_clients_own_search_found_are_text_of_its_result() -> None:
    """Claude Code answers its tool ToolSearch so, and sends what was found with `defer_loading`."""
    found = [{"type": "tool_reference", "tool_name": name} for name in ("weather", "WebFetch")]
    tools = [TOOL, {**TOOL, "name": "WebFetch", "defer_loading": True}]
    made = messages(messages=[*HI, say(USE), ask({**RESULT, "content": found})], tools=tools)
    assert made[-1] == {
        "role": "tool",
        "content": "Tool found: weather\nTool found: WebFetch",
        "tool_call_id": "toolu_1",
    }
    error = refused(messages=[*HI, say(USE), ask({**RESULT, "content": [{"type": "image"}]})])
    assert error.param == "messages[2].content[0].content[0].type"
    assert "takes text only" in error.message


def test_fields_become_those_of_a_chat() -> None:
    made = chat(
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        metadata={"user_id": "ann"},
        stream=True,
        service_tier="auto",
        seed=7,
        deadline=3,
    )
    assert (made.model, made.max_completion_tokens, made.stop, made.stream) == ("m", 16, ["END"], True)
    assert (made.temperature, made.top_p, made.top_k, made.user) == (0.5, 0.9, 5, "ann")
    assert (made.seed, made.deadline) == (7, 3)
    assert made.tools is made.tool_choice is made.response_format is made.chat_template_kwargs is None


def test_a_conversation_with_tools_becomes_one_of_a_chat() -> None:
    assert messages(
        system=[text("Be brief.") | {"cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        messages=[
            {"role": "user", "content": "Weather in Rome and Oslo?"},
            say(THOUGHT, text("Let me see."), USE, USE | {"id": "toolu_2", "input": {"city": "Oslo"}}),
            ask(
                RESULT | {"content": [text("18"), text("degrees")]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no answer", "is_error": True},
                text("And now?"),
            ),
        ],
        tools=[TOOL],
    ) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Rome and Oslo?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {
                    "id": f"toolu_{number}",
                    "type": "function",
                    "function": {"name": "weather", "arguments": json.dumps({"city": city}).replace(" ", "")},
                }
                for number, city in ((1, "Rome"), (2, "Oslo"))
            ],
            "reasoning_content": "Rome is warm.",
        },
        {"role": "tool", "content": "18\ndegrees", "tool_call_id": "toolu_1"},
        {"role": "tool", "content": "Error: no answer", "tool_call_id": "toolu_2"},
        {"role": "user", "content": "And now?"},
    ]


def test_consecutive_messages_of_a_role_are_one() -> None:
    assert messages(
        system="Be brief.",
        messages=[
            {"role": "system", "content": "Really."},
            *HI,
            ask(text("again")),
            say(text("Hello."), USE),
            ask(text("see")),
            ask(RESULT),
        ],
        tools=[TOOL],
    ) == [
        {"role": "system", "content": [text("Be brief."), text("Really.")]},
        {"role": "user", "content": [text("hi"), text("again")]},
        {
            "role": "assistant",
            "content": "Hello.",
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city":"Rome"}'},
                }
            ],
        },
        {"role": "tool", "content": "18 degrees", "tool_call_id": "toolu_1"},
        {"role": "user", "content": "see"},
    ]


def test_the_answer_continues_a_last_message_of_the_assistant() -> None:
    made = chat(messages=[*HI, say(text("The answer is ("))])
    assert made.continue_final_message is True
    assert len(made.messages) == 2
    for content in ("", []):
        empty = chat(messages=[*HI, {"role": "assistant", "content": content}])
        assert empty.continue_final_message is None
        assert len(empty.messages) == 1


def test_a_billing_header_in_the_system_prompt_does_not_reach_the_model() -> None:
    header = text("x-anthropic-billing-header: cc_version=2.0.1; cch=4f1a2;")
    assert messages(system=[header, text("You are an agent.")])[0] == {
        "role": "system",
        "content": "You are an agent.",
    }
    assert messages(system=[header])[0]["role"] == "user"


def test_thoughts_of_earlier_turns_are_left_out_where_the_request_says_so() -> None:
    turns = [*HI, say(THOUGHT, text("One.")), *HI, say(THOUGHT, text("Two.")), *HI]

    def thinking(**edit: Any) -> list[bool]:
        edits = {"edits": [{"type": "clear_thinking_20251015", **edit}]}
        made = messages(messages=turns, context_management=edits)
        return ["reasoning_content" in message for message in made if message["role"] == "assistant"]

    assert thinking(keep="all") == [True, True]
    assert thinking() == [False, True]
    assert thinking(keep={"type": "thinking_turns", "value": 1}) == [False, True]
    assert thinking(keep={"type": "thinking_turns", "value": 5}) == [True, True]
    assert ["reasoning_content" in one for one in messages(messages=turns)] == [
        False,
        True,
        False,
        True,
        False,
    ]


def test_a_redacted_thought_is_left_out() -> None:
    sealed = {"type": "redacted_thinking", "data": "xyz"}
    assert messages(messages=[*HI, say(sealed, text("One.")), *HI])[1] == {
        "role": "assistant",
        "content": "One.",
    }


@pytest.mark.parametrize(
    ("choice", "wanted", "parallel"),
    [
        ({"type": "auto"}, None, None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        (
            {"type": "tool", "name": "weather"},
            {"type": "function", "function": {"name": "weather"}},
            None,
        ),
        ({"type": "none"}, "none", None),
        ({"type": "auto", "disable_parallel_tool_use": True}, None, False),
    ],
)
def test_tool_choices_become_those_of_a_chat(choice: Any, wanted: Any, parallel: bool | None) -> None:
    made = json.loads(encode_body(chat(tools=[TOOL], tool_choice=choice)))
    assert (made["tool_choice"], made["parallel_tool_calls"]) == (wanted, parallel)


def test_tools_without_a_schema_are_skipped_and_named() -> None:
    made = chat(
        tools=[
            SEARCH,
            TOOL | {"type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}},
            {"type": "bash_20250124", "name": "bash"},
            {"type": "mcp_toolset", "mcp_server_name": "files"},
            {"type": "odd", "name": "line\nbreak"},
        ]
    )
    assert made.skipped == ("tools[0] web_search", "tools[2] bash", "tools[3]", "tools[4]")
    assert made.tools is not None
    assert [tool.function.name for tool in made.tools] == ["weather"]  # type: ignore[union-attr]


def test_a_tool_of_a_new_type_with_a_schema_is_shown() -> None:
    made = chat(tools=[TOOL | {"type": "text_editor_20991231"}])
    assert made.skipped == ()


def test_examples_of_a_tools_input_are_in_its_description() -> None:
    made = chat(tools=[TOOL | {"input_examples": [{"city": "Rome"}]}])
    assert made.tools[0].function.description == 'Of a city.\n\nExamples of the input:\n{"city":"Rome"}'  # type: ignore[index,union-attr]


def test_an_output_format_is_a_response_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        made = chat(**fields)
        assert made.response_format.json_schema.schema == schema  # type: ignore[union-attr]


def test_thinking_and_effort_reach_the_template() -> None:
    thinks = {"enable_thinking": True, "thinking": True}
    assert chat(thinking={"type": "enabled", "budget_tokens": 2048}).chat_template_kwargs == thinks
    assert chat(thinking={"type": "adaptive"}).chat_template_kwargs == thinks
    assert chat(thinking={"type": "enabled", "budget_tokens": 2048}).thinking_budget == 2048
    off = chat(thinking={"type": "disabled"}, chat_template_kwargs={"thinking": None})
    assert off.reasoning_effort == "none"
    assert off.chat_template_kwargs == {"enable_thinking": False, "thinking": None}
    for effort, wanted in (("low", "low"), ("max", "high")):
        assert chat(output_config={"effort": effort}).chat_template_kwargs == {"reasoning_effort": wanted}


def test_a_count_needs_no_max_tokens_and_has_the_same_prompt() -> None:
    fields = {"system": "Be brief.", "messages": HI, "tools": [SEARCH, TOOL], "tool_choice": {"type": "any"}}
    count = decode_body(json.dumps(fields).encode(), CountTokensRequest).chat()
    whole = chat(**fields)
    assert (count.messages, count.tools, count.tool_choice) == (
        whole.messages,
        whole.tools,
        whole.tool_choice,
    )


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("max_tokens", {"max_tokens": None}),
        ("max_tokens", {"max_tokens": 0}),
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "assistant", "content": ""}]}),
        ("messages", {"messages": [{"role": "system", "content": "x"}]}),
        ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": ""}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": []}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[1].content", {"messages": [*HI, say(), *HI]}),
        ("messages[0].content[0].text", {"messages": [ask(text(""))]}),
        ("messages[0].content[0].type", {"messages": [ask({"type": "image", "source": {}})]}),
        ("messages[0].content[1].type", {"messages": [ask(text("x"), {"type": "document"})]}),
        ("messages[0].content[0].type", {"messages": [ask({"text": "x"})]}),
        ("messages[0].content[0]", {"messages": [ask(USE)]}),
        ("messages[1].content[0]", {"messages": [*HI, say(RESULT)]}),
        ("messages[0].content[0].tool_use_id", {"messages": [ask(RESULT)]}),
        ("messages[2].content[1].tool_use_id", {"messages": [*HI, say(USE), ask(RESULT, RESULT)]}),
        (
            "messages[4].content[0].tool_use_id",
            {"messages": [*HI, say(USE), *HI, say(THOUGHT), ask(RESULT)]},
        ),
        ("messages[3].content[0].id", {"messages": [*HI, say(USE), ask(RESULT), say(USE), ask(RESULT)]}),
        ("messages[1].content[0]", {"messages": [*HI, say(USE)]}),
        (
            "messages[2].content[0].content[0].type",
            {"messages": [*HI, say(USE), ask(RESULT | {"content": [{"type": "image"}]})]},
        ),
        ("messages[1].content[0].input", {"messages": [*HI, say(USE | {"input": "x"})]}),
        ("system[0].type", {"system": [{"type": "image"}]}),
        ("tools[0].input_schema", {"tools": [{"name": "f"}]}),
        ("tools[0].name", {"tools": [{"input_schema": {}}]}),
        ("tool_choice.name", {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}),
        ("tool_choice.name", {"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}),
        ("tool_choice", {"tools": [SEARCH], "tool_choice": {"type": "any"}}),
        ("tool_choice", {"tool_choice": {"type": "any"}}),
        ("tool_choice.type", {"tools": [TOOL], "tool_choice": {"type": "required"}}),
        ("thinking.type", {"thinking": {"type": "between_tools"}}),
        ("thinking.budget_tokens", {"thinking": {"type": "enabled"}}),
        ("output_config.effort", {"output_config": {"effort": "enormous"}}),
        ("stop_sequences[0]", {"stop_sequences": [""]}),
        ("service_tier", {"service_tier": "flex"}),
        ("temperature", {"temperature": 3}),
        (
            "context_management.edits[0].type",
            {"context_management": {"edits": [{"type": "compact_20260112"}]}},
        ),
        ("container", {"container": "c"}),
        ("mcp_servers", {"mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}),
        ("inference_geo", {"inference_geo": "eu"}),
        ("grammar", {"regex": "a", "grammar": "start: /a/"}),
        ("regex", {"regex": "a", "output_format": {"type": "json_schema", "schema": {}}}),
    ],
)
def test_what_is_wrong_is_refused_by_the_name_of_its_field(param: str, fields: dict[str, Any]) -> None:
    assert refused(**fields).param == param


def test_other_content_than_text_is_refused_with_what_to_send() -> None:
    error = refused(messages=[ask({"type": "image", "source": {}})])
    assert "'image', but this server takes text only" in error.message


def test_a_request_in_the_form_of_claude_codes_becomes_a_chat() -> None:
    """As version 2.1.197 sends them, in other words."""
    edit = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "Where.", "minLength": 1},
            "all": {"type": "boolean", "default": False},
            "lines": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
            "env": {
                "type": "object",
                "propertyNames": {"type": "string"},
                "additionalProperties": {"type": "string"},
            },
        },
        "required": ["path"],
        "additionalProperties": False,
    }
    cached = {"cache_control": {"type": "ephemeral"}}
    made = chat(
        system=[
            text("x-anthropic-billing-header: cc_version=2.1.197.1c0; cc_entrypoint=cli;"),
            text("You are an agent.") | cached,
            text("\nYou edit files.") | cached,
        ],
        messages=[
            ask(text("<system-reminder>\nNotes.\n</system-reminder>"), text("Say hello.") | cached),
            {"role": "system", "content": "You have these agents: ..."},
        ],
        tools=[{"name": "Edit", "description": "Edits a file.", "input_schema": edit}],
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        metadata={"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
        max_tokens=32000,
        stream=True,
    )
    assert json.loads(encode_body(made))["messages"] == [
        {"role": "system", "content": [text("You are an agent."), text("\nYou edit files.")]},
        {
            "role": "user",
            "content": [text("<system-reminder>\nNotes.\n</system-reminder>"), text("Say hello.")],
        },
        {"role": "system", "content": "You have these agents: ..."},
    ]
    assert made.tools[0].function.parameters == edit  # type: ignore[index,union-attr]
    assert made.skipped == ()


def test_values_that_change_nothing_are_accepted() -> None:
    chat(
        container=None,
        mcp_servers=[],
        fallbacks=[],
        context_management={"edits": []},
        cache_control={"type": "ephemeral"},
        speed="fast",
        unknown={"a": 1},
    )
