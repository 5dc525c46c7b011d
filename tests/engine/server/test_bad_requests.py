"""What clients get wrong: a status, an OpenAI-shaped error that names the field, and a server that lives
on."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from live_server import CONTEXT, LiveServer

HI = [{"role": "user", "content": "Hi"}]
NONSENSE = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}


def refused(server: LiveServer, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
    response = server.post(path, **body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def completes(server: LiveServer) -> None:
    response = server.post("/v1/completions", prompt="Hello", max_tokens=1)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [""]}, "prompt[0]"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1_000_000]}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": -2}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "a", "n": 512}, "n"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "best_of": 129}, "best_of"),
        ({"prompt": "a", "best_of": 9, "n": 2}, "best_of"),
        ({"prompt": "a", "best_of": 4, "resume_token_ids": [5], "max_tokens": 3}, "best_of"),
        ({"prompt": "a", "temperature": 3}, "temperature"),
        ({"prompt": "a", "logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"prompt": "a", "stop_token_ids": [1_000_000]}, "stop_token_ids"),
        ({"prompt": "a", "stop": [""]}, "stop[0]"),
        ({"prompt": "a", "logprobs": 1000}, "logprobs"),
        ({"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "priority_class": "royal"}, "priority_class"),
        ({"prompt": "a", "regex": "a", "response_format": {"type": "json_object"}}, "regex"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
        ({"prompt": "a", "regex": "(unclosed"}, "regex"),
        ({"prompt": "a", "grammar": "start: nowhere"}, "grammar"),
        ({"prompt": "a", "max_tokens": 1, "resume_token_ids": [5, 5]}, "resume_token_ids"),
        ({}, "prompt"),
    ],
)
def test_a_bad_completion_request_names_its_field(
    server: LiveServer, body: dict[str, Any], param: str
) -> None:
    """E4, E5, E15, E18 and their siblings."""
    assert refused(server, "/v1/completions", **body)["param"] == param
    completes(server)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, None),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": HI, "max_tokens": 0}, "max_tokens"),
        ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HI, "tool_choice": "required"}, "tool_choice"),
        ({"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": "a b " * CONTEXT}]}, "messages"),
        ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": HI, "tool_choice": "required", "tools": [NONSENSE]}, "tools"),
    ],
)
def test_a_bad_chat_request_names_its_field(
    server: LiveServer, body: dict[str, Any], param: str | None
) -> None:
    error = refused(server, "/v1/chat/completions", **body)
    if param is not None:
        assert error["param"] == param
    completes(server)


def test_what_decodes_but_is_nested_too_deeply_is_a_400(server: LiveServer) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        schema = {"type": "object", "properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    error = refused(server, "/v1/chat/completions", messages=HI, tools=[tool], tool_choice="required")
    assert "nested too deeply" in error["message"]
    completes(server)


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"city": "Par', ""])
def test_earlier_arguments_that_are_no_json_do_not_end_a_conversation(
    server: LiveServer, arguments: str
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}, *HI]
    for path, more in (("/v1/chat/completions", {"max_tokens": 1}), ("/tokenize", {})):
        response = server.post(path, messages=messages, **more)
        assert response.status_code == 200, response.text


def test_a_message_names_the_field_of_the_request(server: LiveServer) -> None:
    """And not the engine's, where several fields of the API become one."""
    best_of = refused(server, "/v1/completions", prompt="a", best_of=129)
    assert best_of["message"].startswith("best_of must be at most")
    chat = refused(server, "/v1/chat/completions", messages=HI, logprobs=True, top_logprobs=21)
    assert chat["message"].startswith("top_logprobs must be at most")
    bias = refused(server, "/v1/completions", prompt="a", logit_bias={"not_a_token_id": 1})
    assert "not_a_token_id" in bias["message"]


@pytest.mark.parametrize("extra", [0, 1])
def test_a_prompt_that_leaves_no_room_is_refused_naming_both_numbers(server: LiveServer, extra: int) -> None:
    """E3."""
    error = refused(server, "/v1/completions", prompt=[100] * (CONTEXT + extra))
    assert str(CONTEXT) in error["message"]
    assert str(CONTEXT + extra) in error["message"]
    assert error["code"] == "context_length_exceeded"
    # litellm and what is built on it tell this error by OpenAI's words.
    assert error["message"].startswith(f"This model's maximum context length is {CONTEXT} tokens. However, ")


@pytest.mark.parametrize(
    "bad",
    [
        {"regex": "(unclosed"},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
        {"grammar": "start: nowhere"},
    ],
)
def test_a_bad_grammar_is_refused_and_the_next_request_is_served(
    server: LiveServer, bad: dict[str, Any]
) -> None:
    """E16."""
    refused(server, "/v1/completions", prompt="a", **bad)
    good = server.post("/v1/completions", prompt="a", regex="yes|no", max_tokens=5).json()
    assert good["choices"][0]["text"] in ("yes", "no")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b'{"prompt": "\xed\xa0\x80"}', b"[" * 200_000, b'{"a":' * 100_000, b"null"],
)
def test_a_body_that_is_no_request_is_a_400(server: LiveServer, body: bytes) -> None:
    with server.http as http:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/admin/warmup"):
            response = http.post(path, content=body)
            assert response.status_code == 400, (path, response.text)
            assert response.json()["error"]["message"]
    completes(server)


@pytest.mark.parametrize("body", [rb'{"prompt": "\ud800", "max_tokens": 1}', rb'{"prompt": "a\ud800"}'])
def test_half_a_surrogate_pair_is_a_400(server: LiveServer, body: bytes) -> None:
    with server.http as http:
        response = http.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert "surrogate" in response.json()["error"]["message"]
    completes(server)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_a_413(server: LiveServer, chunked: bool) -> None:
    size = (32 << 20) + 1

    def parts():
        for _ in range(33):
            yield b" " * (1 << 20)

    with server.http as http:
        response = http.post("/v1/completions", content=parts() if chunked else b" " * size)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_a_prompt_of_megabytes_is_refused_without_tokenizing_it(server: LiveServer) -> None:
    error = refused(server, "/v1/completions", prompt="word " * 2_000_000)
    assert error["code"] == "context_length_exceeded"


def test_an_unknown_model_is_a_404_through_openais_client(server: LiveServer) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.chat.completions.create(model="gpt-4", messages=HI)  # type: ignore[arg-type]
    assert caught.value.code == "model_not_found"
    assert "smollm2" in caught.value.message


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/chat", 404),
    ],
)
def test_the_routers_own_errors_have_the_same_shape(
    server: LiveServer, method: str, path: str, status: int
) -> None:
    with server.http as http:
        response = http.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert status != 405 or response.headers["allow"]


def test_a_base_url_without_v1_is_said(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="base URL ends in /v1"):
        client.models.list()
    with pytest.raises(openai.NotFoundError, match="base URL ends in /v1"):
        client.chat.completions.create(model="smollm2", messages=HI)  # type: ignore[arg-type]


def test_a_template_that_objects_is_a_400_in_its_own_words(narrow_server: LiveServer) -> None:
    """E17."""
    with narrow_server.http as http:
        response = http.post(
            "/v1/chat/completions",
            json={"messages": [*HI, *HI], "max_tokens": 1},
            headers={"Authorization": "Bearer key-two"},
        )
    assert response.status_code == 400
    assert "roles must alternate" in response.json()["error"]["message"]


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic key-one", "Bearer"])
def test_without_a_valid_key_nothing_is_served(narrow_server: LiveServer, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    with narrow_server.http as http:
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/admin/warmup")):
            response = http.request(method, path, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert http.get("/ready").status_code == 200


def test_logs_hold_no_prompts_and_no_keys(narrow_server: LiveServer) -> None:
    with narrow_server.http as http:
        http.post(
            "/v1/completions",
            json={"prompt": "my password is swordfish", "max_tokens": 1, "model": "strict"},
            headers={"Authorization": "Bearer key-one"},
        )
        http.post(
            "/v1/completions", content=b'{"prompt": swordfish', headers={"Authorization": "Bearer key-one"}
        )
    assert "swordfish" not in narrow_server.log
    assert "key-one" not in narrow_server.log
