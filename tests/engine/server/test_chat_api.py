"""`/v1/chat/completions` through OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from live_server import BLOCK, LiveServer

from leadline.engine.server.api.params import chat_sampling
from leadline.protocol.openai import ChatCompletionRequest, decode_body

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


def test_the_demo_model_answers(server: LiveServer) -> None:
    answer = server.client.chat.completions.create(
        model="smollm2", messages=FRANCE, temperature=0, max_tokens=32
    )
    (choice,) = answer.choices
    assert choice.message.content == ANSWER
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.model == "smollm2"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens == server.post("/tokenize", messages=FRANCE).json()["count"]


def test_a_stream_says_role_content_finish_and_usage_in_that_order(server: LiveServer) -> None:
    chunks = list(
        server.client.chat.completions.create(
            model="smollm2",
            messages=FRANCE,
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *body, finish, usage = chunks
    assert body[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in body) == ANSWER
    assert all(chunk.choices[0].finish_reason is None and chunk.usage is None for chunk in body)
    assert finish.choices[0].finish_reason == "stop"
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens > 5
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_usage_has_none(server: LiveServer) -> None:
    chunks = list(
        server.client.chat.completions.create(model="smollm2", messages=FRANCE, max_tokens=2, stream=True)
    )
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_the_second_request_finds_its_prompt_cached(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "Tell me a story about a lighthouse keeper. " * 4}]

    def cached() -> tuple[int, int, str | None]:
        answer = server.client.chat.completions.create(
            model="smollm2", messages=messages, max_tokens=4, temperature=0
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return (
            answer.usage.prompt_tokens_details.cached_tokens or 0,
            answer.usage.prompt_tokens,
            answer.choices[0].message.content,
        )

    server.post("/admin/reset_prefix_cache")
    first, prompt, text = cached()
    second, _, again = cached()
    assert first == 0
    assert second == (prompt - 1) // BLOCK * BLOCK
    assert again == text


def test_n_choices_are_numbered_and_share_the_prompt(server: LiveServer) -> None:
    answer = server.client.chat.completions.create(
        model="smollm2", messages=FRANCE, n=4, temperature=1.0, max_tokens=8, seed=7
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == server.post("/tokenize", messages=FRANCE).json()["count"]
    assert answer.usage.completion_tokens > 8


def test_streamed_choices_are_the_same_as_whole_ones(server: LiveServer) -> None:
    def request(**more: object):
        return server.client.chat.completions.create(
            model="smollm2", messages=FRANCE, n=3, temperature=0.9, max_tokens=8, seed=11, **more
        )

    texts = ["", "", ""]
    for chunk in request(stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in request().choices]


def test_a_stop_string_ends_the_answer_before_itself(server: LiveServer) -> None:
    answer = server.client.chat.completions.create(
        model="smollm2", messages=FRANCE, temperature=0, max_tokens=32, stop=["France"]
    )
    assert answer.choices[0].message.content == "The capital of "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_dump()["stop_reason"] == "France"


def test_logprobs_name_the_tokens_of_the_answer(server: LiveServer) -> None:
    answer = server.client.chat.completions.create(
        model="smollm2", messages=FRANCE, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry in logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert bytes(entry.bytes or []).decode() == entry.token


def test_streamed_logprobs_equal_whole_ones(server: LiveServer) -> None:
    whole = server.client.chat.completions.create(
        model="smollm2", messages=FRANCE, temperature=0, max_tokens=6, logprobs=True
    )
    streamed = []
    for chunk in server.client.chat.completions.create(
        model="smollm2", messages=FRANCE, temperature=0, max_tokens=6, logprobs=True, stream=True
    ):
        logprobs = chunk.choices[0].logprobs
        if logprobs is not None and logprobs.content:
            streamed += [entry.token for entry in logprobs.content]
    assert whole.choices[0].logprobs is not None
    assert streamed == [entry.token for entry in whole.choices[0].logprobs.content or []]


def test_bytes_of_logprobs_join_to_the_answer(server: LiveServer) -> None:
    """Also where a token is half a character."""
    messages = [{"role": "user", "content": "Repeat: 東京は日本の首都"}]
    answer = server.client.chat.completions.create(
        model="smollm2",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=12,
        logprobs=True,
        top_logprobs=3,
        extra_body={"regex": "[東京日本]{4,}"},
    )
    entries = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    data = b"".join(bytes(entry.bytes or []) for entry in entries or [])
    assert data.decode("utf-8", "ignore") == (answer.choices[0].message.content or "").rstrip("\ufffd")
    assert any(len(bytes(entry.bytes or []).decode("utf-8", "ignore")) == 0 for entry in entries or [])


def test_an_answer_continues_the_last_message(server: LiveServer) -> None:
    answer = server.post(
        "/v1/chat/completions",
        messages=[*FRANCE, {"role": "assistant", "content": "The capital of France is"}],
        continue_final_message=True,
        temperature=0,
        max_tokens=3,
    ).json()
    assert answer["choices"][0]["message"]["content"].startswith(" Paris")


def test_an_answer_resumes_behind_tokens_already_given(server: LiveServer) -> None:
    """What a gateway does when a pod dies in the middle of an answer: same request, plus the tokens it
    has."""
    body = {"messages": FRANCE, "temperature": 0.8, "seed": 3, "max_tokens": 12, "return_token_ids": True}
    whole = server.post("/v1/chat/completions", **body).json()["choices"][0]
    head = whole["token_ids"][:5]
    rest = server.post("/v1/chat/completions", **body, resume_token_ids=head).json()
    assert head + rest["choices"][0]["token_ids"] == whole["token_ids"]
    assert whole["message"]["content"].endswith(rest["choices"][0]["message"]["content"])


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASK = [{"role": "user", "content": "What is the weather in Paris? Call the tool."}]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_tool_call_has_arguments_that_fit_its_schema(server: LiveServer, choice: object) -> None:
    answer = server.client.chat.completions.create(
        model="smollm2",
        messages=ASK,
        tools=[WEATHER],
        tool_choice=choice,  # type: ignore[arg-type]
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=100,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    assert call.id
    assert answer.choices[0].message.content is None
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_tool_call_streams_in_pieces_that_add_up(server: LiveServer) -> None:
    name, arguments, finish = "", "", None
    for chunk in server.client.chat.completions.create(
        model="smollm2",
        messages=ASK,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=100,
        stream=True,
    ):
        finish = chunk.choices[0].finish_reason or finish
        for part in chunk.choices[0].delta.tool_calls or []:
            assert part.index == 0
            name += (part.function and part.function.name) or ""
            arguments += (part.function and part.function.arguments) or ""
    assert name == "get_weather"
    assert json.loads(arguments)["city"]
    assert finish == "tool_calls"


LONG = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "minLength": 80, "maxLength": 90}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "note"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_streams_its_name_first_and_arguments_as_they_come(
    server: LiveServer, choice: object
) -> None:
    body = {"messages": ASK, "tools": [LONG], "tool_choice": choice, "temperature": 0, "max_tokens": 120}
    parts, finish = [], None
    stream = server.client.chat.completions.create(model="smollm2", **body, stream=True)  # type: ignore[call-overload]
    for chunk in stream:
        assert not chunk.choices[0].delta.content
        parts += chunk.choices[0].delta.tool_calls or []
        finish = chunk.choices[0].finish_reason or finish
    whole = server.client.chat.completions.create(model="smollm2", **body)  # type: ignore[call-overload]
    first, *rest = [part for part in parts if part.index == 0]
    assert (first.function.name, first.type) == ("note", "function")
    assert first.id
    assert all(part.id is None and part.function.name is None for part in rest)
    assert len(rest) > 10, "piece by piece"
    arguments = "".join(part.function.arguments for part in (first, *rest))
    assert arguments == whole.choices[0].message.tool_calls[0].function.arguments
    assert len(json.loads(arguments)["text"]) >= 80
    assert finish == whole.choices[0].finish_reason


def test_a_call_goes_on_behind_tokens_already_given(server: LiveServer) -> None:
    """Another pod continues the call: no second id and name, and the rest of the arguments."""
    body = {"messages": ASK, "tools": [LONG], "tool_choice": "required", "temperature": 0, "max_tokens": 60}
    body |= {"stream": True, "return_token_ids": True}

    def choices(**more: object) -> list[dict[str, Any]]:
        text = server.post("/v1/chat/completions", **body, **more).text
        chunks = [json.loads(event[6:]) for event in text.split("\n\n") if event.startswith("data: {")]
        return [chunk["choices"][0] for chunk in chunks]

    def parts(of: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [part for choice in of for part in choice["delta"].get("tool_calls", [])]

    whole = choices()
    ids = [token for choice in whole for token in choice.get("token_ids", [])]
    for cut in (1, len(ids) // 2, len(ids) - 2):
        # The chunk of a token has what the token brings.
        seen = next(
            n for n in range(len(whole)) if sum(len(c.get("token_ids", [])) for c in whole[:n]) >= cut
        )
        rest = choices(resume_token_ids=ids[:cut])
        arguments = [part["function"]["arguments"] for part in parts(rest)]
        assert "".join(arguments) == "".join(p["function"]["arguments"] for p in parts(whole[seen:]))
        assert sum("id" in part for part in parts(whole[:seen]) + parts(rest)) == 1
        assert rest[-1]["finish_reason"] == whole[-1]["finish_reason"]


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_cut_by_length_is_a_call(server: LiveServer, choice: object, stream: bool) -> None:
    answer = server.client.chat.completions.create(
        model="smollm2",
        messages=ASK,
        tools=[LONG],
        tool_choice=choice,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=20,
        stream=stream,
    )
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        finish = chunks[-1].finish_reason
        content = "".join(chunk.delta.content or "" for chunk in chunks)
        calls = [part for chunk in chunks for part in chunk.delta.tool_calls or []]
    else:
        finish = answer.choices[0].finish_reason
        content = answer.choices[0].message.content or ""
        calls = answer.choices[0].message.tool_calls
    assert (finish, content, calls[0].function.name) == ("length", "", "note")
    assert "".join(part.function.arguments for part in calls).startswith("{")


def test_a_choice_may_allow_some_tools_only(server: LiveServer) -> None:
    allowed = {"mode": "required", "tools": [NAMED]}
    answer = server.post(
        "/v1/chat/completions",
        messages=ASK,
        tools=[WEATHER, LONG],
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
        max_tokens=12,
    ).json()
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "note"


@pytest.mark.parametrize("stream", [False, True])
def test_custom_tools_are_skipped_and_named_in_a_header(server: LiveServer, stream: bool) -> None:
    custom = {"type": "custom", "custom": {"name": "shell"}}
    body = {"messages": ASK, "max_tokens": 1, "stream": stream}
    response = server.post("/v1/chat/completions", tools=[WEATHER, custom], **body)
    assert response.status_code == 200
    assert response.headers["x-leadline-skipped"] == "tools[1] shell"
    assert "tools[1] shell" in server.log
    plain = server.post("/v1/chat/completions", tools=[WEATHER], **body)
    assert "x-leadline-skipped" not in plain.headers


def test_the_older_form_of_calls_and_their_answers_is_the_newer_one(server: LiveServer) -> None:
    call = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    older = [
        {"role": "assistant", "content": "One moment.", "function_call": call},
        {"role": "function", "name": "get_weather", "content": "rain"},
    ]
    newer = [
        {
            "role": "assistant",
            "content": "One moment.",
            "tool_calls": [{"id": "c", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    tokens = [server.post("/tokenize", messages=ASK + talk).json()["tokens"] for talk in (older, newer)]
    assert tokens[0] == tokens[1]


def test_top_p_0_is_greedy(server: LiveServer) -> None:
    body = {"messages": FRANCE, "max_tokens": 8}
    greedy = server.post("/v1/chat/completions", **body, temperature=0).json()
    narrow = server.post("/v1/chat/completions", **body, temperature=2, top_p=0, stop="").json()
    assert narrow["choices"][0]["message"] == greedy["choices"][0]["message"]


@pytest.mark.parametrize("at_end", [True, False])
def test_the_usage_so_far_is_in_every_chunk_if_asked_for(server: LiveServer, at_end: bool) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": FRANCE}),
        ("/v1/completions", {"prompt": "Rivers:", "logprobs": 0, "n": 2}),
    ):
        options = {"continuous_usage_stats": True, "include_usage": at_end or None}
        text = server.post(path, **body, max_tokens=6, stream=True, stream_options=options).text
        chunks = [json.loads(event[6:]) for event in text.split("\n\n") if event.startswith("data: {")]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert len(set(counts)) >= 5
        assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)
        assert (chunks[-1]["choices"] == []) == at_end
        assert counts[-1] == 6 * body.get("n", 1)
        options["include_usage"] = False
        text = server.post(path, **body, max_tokens=1, stream=True, stream_options=options).text
        assert '"usage":{' not in text


def test_tools_that_are_not_used_leave_plain_content(server: LiveServer) -> None:
    answer = server.client.chat.completions.create(
        model="smollm2", messages=FRANCE, tools=[WEATHER], tool_choice="none", temperature=0, max_tokens=16
    )
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.tool_calls is None


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("older", [False, True])
def test_a_json_schema_shapes_the_answer(server: LiveServer, stream: bool, older: bool) -> None:
    """`older`: the form of llama.cpp and of LangChain's first versions."""
    newer = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    answer = server.client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Describe a person as JSON."}],
        response_format={"type": "json_object", "schema": SCHEMA} if older else newer,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=80,
        stream=stream,
    )
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        text = answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"
    person = json.loads(text)
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", ["{", "<tool_call>"])
def test_with_tools_and_a_schema_a_model_answers_by_the_schema_or_calls(
    narrow_server: LiveServer, stream: bool, first: str
) -> None:
    """The grammar of the answer forbade the call. A bias says here which of them the model wants."""
    with narrow_server.http as http:
        http.headers["Authorization"] = "Bearer key-one"
        tokens = http.post("/tokenize", json={"prompt": first, "add_special_tokens": False}).json()["tokens"]
        body = {
            "messages": FRANCE,
            "tools": [WEATHER],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "p", "schema": {"enum": [{"city": "Rome"}]}},
            },
            "logit_bias": {str(tokens[0]): 100},
            "max_tokens": 24,
            "temperature": 0,
            "stream": stream,
        }
        if first == "{":
            del body["logit_bias"]
            body["logit_bias"] = {str(token): -100 for token in _tag_tokens(http)}
        response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    if stream:
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        deltas = [event["choices"][0]["delta"] for event in events]
        text = "".join(delta.get("content") or "" for delta in deltas)
        called = any(delta.get("tool_calls") for delta in deltas)
    else:
        message = response.json()["choices"][0]["message"]
        text, called = message["content"] or "", bool(message.get("tool_calls"))
    if first == "{":
        assert json.loads(text) == {"city": "Rome"}
        assert not called
    else:
        assert called or text.startswith("<tool_call>"), "a call that the limit has cut is content"


def _tag_tokens(http) -> list[int]:
    return http.post("/tokenize", json={"prompt": "<tool_call>", "add_special_tokens": False}).json()[
        "tokens"
    ]


def test_a_regex_shapes_the_answer(server: LiveServer) -> None:
    answer = server.client.chat.completions.create(
        model="smollm2", messages=FRANCE, temperature=0, max_tokens=20, extra_body={"regex": "(Paris|Rome)!"}
    )
    assert answer.choices[0].message.content in ("Paris!", "Rome!")


def test_no_alternatives_may_be_asked_for_without_log_probabilities() -> None:
    """Clients that send every parameter they know send this zero."""
    body = msgspec.json.encode({"messages": FRANCE, "top_logprobs": 0})
    assert "logprobs" not in chat_sampling(decode_body(body, ChatCompletionRequest), None)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_between_special_tokens_are_found(narrow_server: LiveServer, stream: bool) -> None:
    """In some models the tags are special tokens, which the text leaves out; the call was content then."""
    call = r"{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}"
    body = {
        "messages": FRANCE,
        "tools": [WEATHER],
        "grammar": f'start: <tool_call> "{call}" </tool_call>',
        "stream": stream,
    }
    with narrow_server.http as http:
        response = http.post("/v1/chat/completions", json=body, headers={"Authorization": "Bearer key-one"})
    assert response.status_code == 200, response.text
    if not stream:
        (choice,) = response.json()["choices"]
        assert choice["message"]["content"] is None
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}
        assert choice["finish_reason"] == "tool_calls"
    else:
        assert '"tool_calls":[{"index":0,' in response.text
        assert "<tool_call>" not in response.text
