"""Reasoning as a server gives it: SmolLM2 behind the chat template and the tokens of a thinking model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, serving

from leadline.engine.hub import resolve_model
from leadline.protocol.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined %}"
    "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}{% endif %}"
)
THINKS: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}, "logit_bias": {"2": -100}}
"""The prompt opens the thought; no EOS, which a model that never learned to think would draw at once."""
PICK = {"type": "json_schema", "json_schema": {"schema": {"enum": ["red", "green"]}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"enum": [1, 2]}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a thinking model's template, and its tags among the special tokens."""
    folder = tmp_path_factory.mktemp("models") / "thinks"
    folder.mkdir()
    source = resolve_model("smollm2", progress=False).path
    for file in source.iterdir():
        if file.name not in ("tokenizer_config.json", "tokenizer.json", "chat_template.jinja"):
            (folder / file.name).symlink_to(file)
    config = json.loads((source / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    words = (source / "tokenizer.json").read_text()
    for word, tag in (("<jupyter_start>", "<think>"), ("<jupyter_text>", "</think>")):
        words = words.replace(f'"{word}"', f'"{tag}"')
    (folder / "tokenizer.json").write_text(words)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with serving(str(folder), "--overlap", "--thinking-budget=8", "--cpu-threads=1") as live:
        yield live


def ask(server: LiveServer, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Name a color."}]
    response = server.post("/v1/chat/completions", **{"messages": messages, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(server: LiveServer, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    messages = [{"role": "user", "content": "Name a color."}]
    given = {"messages": messages, "temperature": 0, "stream": True, **body}
    with server.http as http, http.stream("POST", "/v1/chat/completions", json=given) as response:
        assert response.status_code == 200
        return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]


def joined(chunks: list[dict[str, Any]], field: str) -> str:
    parts = (chunk["choices"][0]["delta"].get(field) for chunk in chunks if chunk["choices"])
    return "".join(part for part in parts if part)


def test_a_budget_ends_the_thought_and_the_answer_follows(server: LiveServer, tokenizer: Tokenizer) -> None:
    answer = ask(server, **THINKS, thinking_budget=5, max_tokens=12, return_token_ids=True)
    choice, usage = answer["choices"][0], answer["usage"]
    message, ids = choice["message"], choice["token_ids"]
    assert message["reasoning"]
    assert message["reasoning_content"] == message["reasoning"]
    assert message["content"]
    assert "think>" not in message["content"] + message["reasoning"]
    assert ids[5:7] == tokenizer.encode("\n</think>", False)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 7}, "5, a newline and the tag"
    default = ask(server, **THINKS, max_tokens=11)["usage"]["completion_tokens_details"]
    assert default == {"reasoning_tokens": 10}, "the server's own budget"


def test_a_prompt_that_may_be_truncated_has_its_thought_and_its_budget(server: LiveServer) -> None:
    wanted = {**THINKS, "thinking_budget": 5, "max_tokens": 12}
    message = ask(server, **wanted)["choices"][0]["message"]
    assert message["reasoning"]
    assert ask(server, **wanted, truncate_prompt_tokens=500)["choices"][0]["message"] == message


def test_a_thought_that_max_tokens_cuts_is_a_thought(server: LiveServer) -> None:
    choice = ask(server, **THINKS, max_tokens=4, thinking_budget=10**30)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning"]


def test_a_stream_brings_the_same_thought_and_answer_and_no_tags(server: LiveServer) -> None:
    wanted = {**THINKS, "thinking_budget": 7, "max_tokens": 14}
    message = ask(server, **wanted)["choices"][0]["message"]
    chunks = stream(server, **wanted, stream_options={"include_usage": True})
    assert joined(chunks, "reasoning") == joined(chunks, "reasoning_content") == message["reasoning"]
    assert joined(chunks, "content") == message["content"]
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 9}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert sum("reasoning" in delta for delta in deltas) > 2, "piece by piece"


def test_an_answer_without_a_thought_has_none(server: LiveServer) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 2}
    for body in (off, {"reasoning_effort": "none", "max_tokens": 2}):
        answer = ask(server, **body)
        assert "reasoning" not in answer["choices"][0]["message"]
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert ask(server, **off)["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]


def test_an_effort_switches_thinking_on(server: LiveServer) -> None:
    answer = ask(server, reasoning_effort="high", logit_bias={"2": -100}, max_tokens=11)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 10


@pytest.mark.parametrize("stops_thinking", [True, False])
def test_structured_output_begins_behind_the_thought(server: LiveServer, stops_thinking: bool) -> None:
    body = {**THINKS, "thinking_budget": 5 if stops_thinking else -1, "max_tokens": 14}
    message = ask(server, **body, response_format=PICK)["choices"][0]["message"]
    if stops_thinking:
        assert message["reasoning"]
        assert json.loads(message["content"]) in ("red", "green")
    else:
        assert message["content"] is None


def test_structured_output_without_a_thought_begins_at_once(server: LiveServer) -> None:
    for extra in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
        message = ask(server, **extra, response_format=PICK, max_tokens=20)["choices"][0]["message"]
        assert json.loads(message["content"]) in ("red", "green")


def test_where_the_model_may_open_its_thought_the_grammar_lets_it(
    server: LiveServer, tokenizer: Tokenizer
) -> None:
    opening = tokenizer.token_id("<think>")
    answer = ask(
        server,
        logit_bias={str(opening): 100, "2": -100},
        thinking_budget=3,
        response_format=PICK,
        max_tokens=30,
    )
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1 + 3 + 2}
    assert json.loads(answer["choices"][0]["message"]["content"]) in ("red", "green")


def test_a_forced_call_comes_behind_the_thought(server: LiveServer) -> None:
    choice_of_tool = {"type": "function", "function": {"name": "add"}}
    body = {**THINKS, "thinking_budget": 3, "max_tokens": 120, "tools": TOOLS, "tool_choice": choice_of_tool}
    choice = ask(server, **body)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["a"] in (1, 2)
    chunks = stream(server, **body)
    assert joined(chunks, "reasoning") == choice["message"]["reasoning"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("resumed", [3, 5, 6, 9])
def test_a_resumed_answer_goes_on_where_it_was(server: LiveServer, resumed: int) -> None:
    """Within the thought, between the forced tokens, and within the answer: also its grammar goes on."""
    regex = "(red|green), (red|green)"
    body = {**THINKS, "thinking_budget": 5, "max_tokens": 24, "seed": 5, "temperature": 1.0, "regex": regex}
    whole = ask(server, **body, return_token_ids=True)
    ids = whole["choices"][0]["token_ids"]
    rest = ask(server, **body, return_token_ids=True, resume_token_ids=ids[:resumed])
    assert rest["choices"][0]["token_ids"] == ids[resumed:]
    message, text = whole["choices"][0]["message"], rest["choices"][0]["message"]
    assert message["reasoning"].endswith(text.get("reasoning", ""))
    assert message["content"].endswith(text["content"])
    for field in ("completion_tokens", "completion_tokens_details"):
        assert whole["usage"][field] == rest["usage"][field]


def test_the_thoughts_of_earlier_turns_reach_the_template(server: LiveServer) -> None:
    def tokens(**message: str) -> int:
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello", **message},
            {"role": "user", "content": "Bye"},
        ]
        return int(server.post("/tokenize", messages=messages).json()["count"])

    plain = tokens()
    assert tokens(reasoning="They greet me") == tokens(reasoning_content="They greet me") > plain + 3


def test_responses_and_messages_give_the_thought_as_an_item_and_a_block(server: LiveServer) -> None:
    extra = {**THINKS, "temperature": 0, "thinking_budget": 4}
    response = server.post("/v1/responses", input="Name a color.", max_output_tokens=10, **extra).json()
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 6}
    message = server.post(
        "/v1/messages",
        model="thinks",
        messages=[{"role": "user", "content": "Name a color."}],
        max_tokens=10,
        logit_bias={"2": -100},
        temperature=0,
        thinking={"type": "enabled", "budget_tokens": 4},
    ).json()
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert message["content"][0]["thinking"] == response["output"][0]["content"][0]["text"]


def test_a_client_that_wants_no_thought_gets_the_answer_alone(server: LiveServer) -> None:
    wanted = {**THINKS, "thinking_token_budget": 5, "max_tokens": 12}
    whole, bare = ask(server, **wanted), ask(server, **wanted, include_reasoning=False)
    message = bare["choices"][0]["message"]
    assert "reasoning" not in message
    assert message["content"] == whole["choices"][0]["message"]["content"]
    assert bare["usage"] == whole["usage"] | {"prompt_tokens_details": bare["usage"]["prompt_tokens_details"]}
    chunks = stream(server, **wanted, include_reasoning=False)
    assert (joined(chunks, "reasoning"), joined(chunks, "content")) == ("", message["content"])
    extra = {**THINKS, "temperature": 0, "thinking_budget": 4, "include_reasoning": False}
    response = server.post("/v1/responses", input="Name a color.", max_output_tokens=10, **extra).json()
    assert [item["type"] for item in response["output"]] == ["message"]
