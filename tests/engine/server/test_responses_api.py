"""`/v1/responses` through OpenAI's own client, with its types as strict judges."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from live_server import CONTEXT, LiveServer
from openai.types.responses import Response, ResponseFunctionToolCall
from pydantic import BaseModel

from responses_reader import Reader

FRANCE = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
GO: Any = {
    "type": "function",
    "name": "go",
    "description": None,
    "parameters": {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = r'<tool_call>\{"name":"go","arguments":\{"n":2\}\}</tool_call>'


def streamed(server: LiveServer, **body: Any) -> tuple[bytes, Reader]:
    got = server.post("/v1/responses", model="smollm2", stream=True, temperature=0, **body)
    assert got.status_code == 200, got.text
    reader = Reader()
    reader.read(got.content)
    assert reader.response is not None
    return got.content, reader


def test_the_demo_model_answers(server: LiveServer) -> None:
    raw = server.client.responses.with_raw_response.create(
        model="smollm2", input=FRANCE, temperature=0, metadata={"a": "b"}, instructions=None
    )
    plain = json.loads(raw.text)
    Response.model_validate_json(raw.text, strict=True)
    answer = raw.parse()
    assert answer.output_text == ANSWER
    assert (answer.status, answer.model, answer.metadata) == ("completed", "smollm2", {"a": "b"})
    assert answer.id.startswith("resp_")
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert answer.completed_at is not None
    assert plain["output"][0].keys() == {"type", "id", "status", "role", "content"}


def test_a_stream_says_what_the_whole_answer_says(server: LiveServer) -> None:
    whole = server.post("/v1/responses", input=FRANCE, temperature=0).json()
    _, reader = streamed(server, input=FRANCE)
    assert reader.response is not None
    for answer in (whole, reader.response):
        for field in ("id", "created_at", "completed_at"):
            answer.pop(field)
        answer["usage"].pop("input_tokens_details")
        answer["output"][0].pop("id")
    assert reader.response == whole


def test_the_clients_own_stream_helper_reads_it(server: LiveServer) -> None:
    with server.client.responses.stream(model="smollm2", input=FRANCE, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == ANSWER


def test_the_limit_makes_a_response_incomplete(small_server: LiveServer) -> None:
    _, reader = streamed(small_server, input=FRANCE, max_output_tokens=2)
    assert reader.response is not None
    assert reader.response["status"] == "incomplete"
    assert reader.response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert reader.items[0]["status"] == "incomplete"
    assert reader.response["usage"]["output_tokens"] == 2


def test_a_schema_holds(small_server: LiveServer) -> None:
    class Place(BaseModel):
        city: Literal["Paris", "Rome"]

    parsed = small_server.client.responses.parse(
        model="smollm2", input=FRANCE, text_format=Place, temperature=0, max_output_tokens=60
    )
    assert parsed.output_parsed is not None
    assert parsed.output_parsed.city in ("Paris", "Rome")


def test_a_call_that_must_be_made_streams_and_its_output_goes_back(small_server: LiveServer) -> None:
    asked: Any = {"role": "user", "content": "Go."}
    _, reader = streamed(
        small_server, input=[asked], tools=[GO], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = reader.items
    ResponseFunctionToolCall.model_validate(call, strict=True)
    assert (call["name"], call["status"]) == ("go", "completed")
    assert json.loads(call["arguments"])["n"] in (1, 2)
    output: Any = {"type": "function_call_output", "call_id": call["call_id"], "output": "Gone."}
    answer = small_server.client.responses.create(
        model="smollm2", input=[asked, call, output], tools=[GO], tool_choice="none", max_output_tokens=8
    )
    assert answer.output[0].type == "message"


def test_text_and_calls_are_items_in_the_order_of_the_output(small_server: LiveServer) -> None:
    _, reader = streamed(
        small_server, input="Go.", tools=[GO], regex=f"Look: {CALL}{CALL}", max_output_tokens=120
    )
    assert [item["type"] for item in reader.items] == ["message", "function_call", "function_call"]
    assert reader.items[0]["content"][0]["text"] == "Look:"
    assert [json.loads(item["arguments"]) for item in reader.items[1:]] == [{"n": 2}, {"n": 2}]
    assert len({item["call_id"] for item in reader.items[1:]}) == 2


def test_log_probabilities_come_with_the_text(server: LiveServer) -> None:
    asked = {"input": FRANCE, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    data, reader = streamed(server, **asked)
    (part,) = reader.items[0]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]).startswith(ANSWER)
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    assert data.count(b'"logprobs":[{') > 3


def test_what_is_skipped_is_named_in_a_header(small_server: LiveServer) -> None:
    answer = small_server.post(
        "/v1/responses",
        input="Hi",
        max_output_tokens=1,
        tools=[{"type": "web_search"}, GO],
        text={"format": {"type": "text"}, "verbosity": "low"},
        truncation="auto",
    )
    assert answer.headers["x-leadline-skipped"] == "tools[0] web_search, text.verbosity, truncation"
    assert [tool["name"] for tool in answer.json()["tools"]] == ["go"]
    Response.model_validate_json(answer.text, strict=True)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", "robot"),
        ({"input": "a " * (2 * CONTEXT)}, "input", "maximum context length"),
        ({"input": "a", "tools": [GO, GO]}, "tools", "twice"),
        ({"input": "a", "regex": "a", "text": {"format": {"type": "json_object"}}}, "regex", "text.format"),
        ({"input": "a", "store": True, "previous_response_id": "r"}, "previous_response_id", "store_seconds"),
        ({"input": "a", "background": True}, "background", "not supported"),
    ],
)
def test_what_cannot_be_served_is_a_400_in_the_words_of_the_api(
    server: LiveServer, body: dict[str, Any], param: str, words: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            server.client.responses.create(model="smollm2", stream=stream, extra_body=body)
        assert refused.value.param == param
        assert words in refused.value.message
