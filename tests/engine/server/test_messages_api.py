"""The Messages API of a server with the demo model, as the anthropic client and raw events show it."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from live_server import CONTEXT, LiveServer
from pydantic import TypeAdapter

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
ASK: dict[str, Any] = {
    "model": "smollm2",
    "max_tokens": 12,
    "messages": [{"role": "user", "content": "Name three rivers of Europe."}],
    "temperature": 0,
}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL: dict[str, Any] = {
    **ASK,
    "max_tokens": 40,
    "tools": [WEATHER],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}


@pytest.fixture(scope="module")
def client(server: LiveServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120)


def arguments(body: dict[str, Any]) -> dict[str, Any]:
    """For the client, whose newest version has no argument for some fields."""
    extra = {name: body[name] for name in ("temperature", "ignore_eos") if name in body}
    return {name: value for name, value in body.items() if name not in extra} | {"extra_body": extra}


def events(server: LiveServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of a stream. Each is valid by the client's own types; their order is the specified one."""
    answer = server.post("/v1/messages", **body, stream=True)
    assert answer.status_code == 200, answer.text
    found = []
    for part in answer.text.split("\n\n")[:-1]:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        if found[-1]["type"] != "ping":
            EVENT.validate_python(found[-1], strict=True)
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    return found


def test_a_text_is_answered_whole_and_streamed_alike(server: LiveServer, client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**arguments(ASK))
    Message.model_validate(whole.model_dump(), strict=True)
    assert (whole.role, whole.model, whole.stop_reason) == ("assistant", "smollm2", "max_tokens")
    assert whole.id.startswith("msg_")
    with client.messages.stream(**arguments(ASK)) as stream:
        pieces = list(stream.text_stream)
        streamed = stream.get_final_message()
    assert [block.text for block in whole.content] == ["".join(pieces)] == [streamed.content[0].text]  # type: ignore[union-attr]
    assert len(pieces) > 4
    assert streamed.stop_reason == "max_tokens"
    assert streamed.usage.output_tokens == whole.usage.output_tokens == 12
    chat = server.post("/v1/chat/completions", **{**ASK, "max_tokens": 12}).json()
    assert chat["choices"][0]["message"]["content"] == "".join(pieces)
    events(server, ASK)


def test_a_call_is_parsed_and_its_result_goes_back(server: LiveServer, client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**arguments(CALL))
    Message.model_validate(whole.model_dump(), strict=True)
    assert whole.stop_reason == "tool_use"
    (call,) = whole.content[:1]
    assert call.type == "tool_use"
    assert call.id.startswith("toolu_")
    assert (call.name, call.input["city"] in ("Paris", "Rome")) == ("weather", True)
    with client.messages.stream(**arguments(CALL)) as stream:
        streamed = stream.get_final_message()
    assert [(block.name, block.input) for block in streamed.content] == [  # type: ignore[union-attr]
        (block.name, block.input)
        for block in whole.content  # type: ignore[union-attr]
    ]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "18 degrees"}
        for block in whole.content  # type: ignore[union-attr]
    ]
    dialogue = [
        *ASK["messages"],
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": results},
    ]
    told = client.messages.create(**arguments({**ASK, "tools": [WEATHER], "messages": dialogue}))
    assert told.usage.input_tokens + (told.usage.cache_read_input_tokens or 0) > whole.usage.input_tokens
    deltas = [event for event in events(server, CALL) if event["type"] == "content_block_delta"]
    assert {event["delta"]["type"] for event in deltas} == {"input_json_delta"}
    assert len(deltas) > 4


def test_a_named_tool_is_called(client: anthropic.Anthropic) -> None:
    choice = {"type": "tool", "name": "weather"}
    answer = client.messages.create(**arguments({**CALL, "tool_choice": choice}))
    assert [block.type for block in answer.content] == ["tool_use"]
    assert answer.stop_reason == "tool_use"


def test_a_call_that_is_cut_keeps_its_text(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**arguments({**CALL, "max_tokens": 20}))
    assert answer.stop_reason == "max_tokens"
    for block in answer.content:
        assert block.type == "tool_use"
        assert "INVALID_JSON" in block.input


def test_a_stop_sequence_is_named(server: LiveServer, client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**arguments({**ASK, "max_tokens": 40, "stop_sequences": ["!!", "e"]}))
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "e")
    assert "e" not in answer.content[0].text  # type: ignore[union-attr]
    last = events(server, {**ASK, "max_tokens": 40, "stop_sequences": ["e"]})[-2]
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "e"}


def test_an_answer_that_fills_the_context_says_so(client: anthropic.Anthropic) -> None:
    words = [{"role": "user", "content": "word " * 470}]
    answer = client.messages.create(
        **arguments({**ASK, "messages": words, "max_tokens": 4000, "ignore_eos": True})
    )
    assert answer.stop_reason == "model_context_window_exceeded"
    assert answer.usage.output_tokens < CONTEXT


def test_an_output_format_holds(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        **arguments({**ASK, "max_tokens": 60}),
        output_config={"format": {"type": "json_schema", "schema": WEATHER["input_schema"]}},
    )
    assert json.loads(answer.content[0].text)["city"] in ("Paris", "Rome")  # type: ignore[union-attr]


def test_a_count_is_the_input_that_usage_reports(server: LiveServer, client: anthropic.Anthropic) -> None:
    shared: dict[str, Any] = {
        "model": "smollm2",
        "system": [{"type": "text", "text": "Be brief. " * 20, "cache_control": {"type": "ephemeral"}}],
        "messages": [*ASK["messages"], {"role": "assistant", "content": "The"}],
        "tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}],
    }
    count = client.messages.count_tokens(**shared)
    MessageTokensCount.model_validate(count.model_dump(), strict=True)
    for cached in (False, True):
        usage = client.messages.create(**shared, max_tokens=1).usage
        assert (usage.cache_read_input_tokens or 0) + usage.input_tokens == count.input_tokens
        assert usage.cache_creation_input_tokens == 0
        if cached:
            assert usage.cache_read_input_tokens
    start = events(server, {**shared, "max_tokens": 1})[0]
    assert start["message"]["usage"]["cache_read_input_tokens"] == usage.cache_read_input_tokens


def test_skipped_tools_are_named_in_a_header(server: LiveServer) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}, WEATHER]
    answer = server.post("/v1/messages", **{**ASK, "tools": tools, "max_tokens": 1})
    assert answer.headers["x-leadline-skipped"] == "tools[0] web_search"


def test_the_last_message_of_the_assistant_is_continued(client: anthropic.Anthropic) -> None:
    messages = [*ASK["messages"], {"role": "assistant", "content": "The answer is: The"}]
    answer = client.messages.create(**arguments({**ASK, "messages": messages, "max_tokens": 2}))
    assert answer.usage.output_tokens == 2


def failed(answer: httpx.Response, status: int, kind: str) -> str:
    """The message of an error in Anthropic's shape."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    ErrorResponse.model_validate(body, strict=True)
    assert set(body) == {"type", "error", "request_id"}
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    assert body["request_id"] == answer.headers["x-request-id"]
    return str(body["error"]["message"])


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_what_is_wrong_is_an_error_in_anthropics_shape(server: LiveServer, path: str) -> None:
    def ask(**fields: Any) -> httpx.Response:
        return server.post(path, **(ASK | fields))

    assert "messages[0].role" in failed(
        ask(messages=[{"role": "king", "content": "x"}]), 400, "invalid_request_error"
    )
    assert "text only" in failed(
        ask(messages=[{"role": "user", "content": [{"type": "image"}]}]), 400, "invalid_request_error"
    )
    assert "tool_use_id" in failed(
        ask(messages=[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]),
        400,
        "invalid_request_error",
    )
    assert "does not exist" in failed(ask(model="other"), 404, "not_found_error")
    with server.http as http:
        failed(http.get(path), 405, "invalid_request_error")
        failed(http.post(path, content=b"{"), 400, "invalid_request_error")
        zipped = {"Content-Encoding": "gzip"}
        failed(http.post(path, content=b"{}", headers=zipped), 415, "invalid_request_error")
        failed(http.post(f"{path}/none", json={}), 404, "not_found_error")


def test_a_million_tokens_are_too_many(server: LiveServer) -> None:
    long = [{"role": "user", "content": "a " * 1_000_000}]
    message = failed(server.post("/v1/messages", **(ASK | {"messages": long})), 400, "invalid_request_error")
    assert message.startswith("prompt is too long: ")
    count = server.post("/v1/messages/count_tokens", model="smollm2", messages=long).json()
    assert count["input_tokens"] > 900_000


def test_max_tokens_is_required(server: LiveServer) -> None:
    body = {key: value for key, value in ASK.items() if key != "max_tokens"}
    assert "max_tokens" in failed(server.post("/v1/messages", **body), 400, "invalid_request_error")


def test_a_request_that_waits_too_long_finds_the_server_overloaded(server: LiveServer) -> None:
    answer = server.post("/v1/messages", **ASK, deadline=0.000001)
    failed(answer, 504, "timeout_error")
