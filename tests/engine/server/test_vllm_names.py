"""Fields of vLLM's clients: bans, token ids of prompts, echo and log probabilities in chats."""

from __future__ import annotations

import json
from typing import Any

import pytest
from live_server import LiveServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "The largest planet is"
SAYS = {"temperature": 0, "max_tokens": 6}


def ask(server: LiveServer, path: str, **fields: Any) -> Any:
    given = {"messages": FRANCE} if path == CHAT else {"prompt": PROMPT}
    answer = server.post(path, **(given | SAYS | fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(server: LiveServer, path: str, **fields: Any) -> list[Any]:
    given = {"messages": FRANCE} if path == CHAT else {"prompt": PROMPT}
    text = server.post(path, **(given | SAYS | fields | {"stream": True})).text
    return [json.loads(event[6:]) for event in text.split("\n\n") if event and event != "data: [DONE]"]


def tokens(server: LiveServer, text: str) -> list[int]:
    found: list[int] = server.post("/tokenize", prompt=text).json()["tokens"]
    return found


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_answer_has_allowed_tokens_only_and_no_bad_words(server: LiveServer, path: str) -> None:
    free = ask(server, path, return_token_ids=True)["choices"][0]
    said = free["token_ids"]
    allowed = ask(server, path, return_token_ids=True, allowed_token_ids=said[2:])["choices"][0]["token_ids"]
    assert set(allowed) <= set(said[2:])
    text = free["text"] if path == TEXT else free["message"]["content"]
    word = max(text.split(), key=len)
    other = ask(server, path, bad_words=[word])["choices"][0]
    assert word not in (other["text"] if path == TEXT else other["message"]["content"])


def test_other_apis_take_them_too(server: LiveServer) -> None:
    (only,) = tokens(server, " the")[:1]
    common = {"allowed_token_ids": [only], "temperature": 0}
    message = server.post("/v1/messages", messages=FRANCE, max_tokens=3, **common).json()
    assert message["content"][0]["text"] == " the" * 3
    response = server.post("/v1/responses", input="Hi", max_output_tokens=3, **common).json()
    assert response["output"][0]["content"][0]["text"] == " the" * 3


def test_a_chat_has_the_prompts_token_ids_once(server: LiveServer) -> None:
    expected = server.post("/tokenize", messages=FRANCE).json()["tokens"]
    assert ask(server, CHAT, return_token_ids=True)["prompt_token_ids"] == expected
    plain = ask(server, CHAT)
    assert (plain["prompt_token_ids"], plain["prompt_logprobs"]) == (None, None)
    assert plain["choices"][0]["token_ids"] is None
    first, *rest = chunks(server, CHAT, return_token_ids=True, n=2)
    assert first["prompt_token_ids"] == expected
    assert not any("prompt_token_ids" in chunk for chunk in rest)
    hidden = chunks(server, CHAT, return_token_ids=True, return_prompt_token_ids=False)
    assert not any("prompt_token_ids" in chunk for chunk in hidden)
    assert any("token_ids" in choice for chunk in hidden for choice in chunk["choices"])


def test_each_choice_of_a_completion_has_its_prompts_token_ids(server: LiveServer) -> None:
    prompts = [tokens(server, PROMPT), [5, 6, 7]]
    whole = ask(server, TEXT, prompt=prompts, return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == prompts
    assert ask(server, TEXT)["choices"][0]["prompt_token_ids"] is None
    found: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in chunks(server, TEXT, prompt=prompts, return_token_ids=True):
        for choice in chunk["choices"]:
            found[choice["index"]].append(choice.get("prompt_token_ids"))
    assert {index: ids[0] for index, ids in found.items()} == dict(enumerate(prompts))
    assert not any(any(ids[1:]) for ids in found.values())


def test_a_resumed_answer_has_no_prompt_token_ids(server: LiveServer) -> None:
    """The client has them from the first attempt."""
    for path in (CHAT, TEXT):
        said = ask(server, path, return_token_ids=True)["choices"][0]["token_ids"][:2]
        text = json.dumps(chunks(server, path, return_token_ids=True, resume_token_ids=said))
        assert '"token_ids"' in text
        assert "prompt_token_ids" not in text


def test_an_answer_names_what_it_stopped_at(server: LiveServer) -> None:
    free = ask(server, TEXT, return_token_ids=True)["choices"][0]
    assert (free["stop_reason"], "matched_stop" in free) == (None, False)
    word, token = free["text"].split()[1], free["token_ids"][2]
    for fields, expected in (({"stop": word}, word), ({"stop_token_ids": [token]}, token)):
        for choice in (
            ask(server, TEXT, **fields)["choices"][0],
            chunks(server, TEXT, **fields)[-1]["choices"][0],
        ):
            assert (choice["stop_reason"], choice["matched_stop"]) == (expected, expected)
    ended = ask(server, CHAT, max_tokens=64)["choices"][0]
    assert ended["finish_reason"] == "stop"
    assert (ended["stop_reason"], ended["matched_stop"]) == (None, 2)


def test_a_chat_repeats_the_message_that_it_continues(server: LiveServer) -> None:
    begun = "The capital of France is"
    messages = [*FRANCE, {"role": "assistant", "content": begun}]
    fields = {"messages": messages, "continue_final_message": True, "max_tokens": 3}
    more = ask(server, CHAT, **fields)["choices"][0]["message"]["content"]
    assert ask(server, CHAT, **fields, echo=True)["choices"][0]["message"]["content"] == begun + more
    first, *rest = chunks(server, CHAT, **fields, echo=True)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": begun}
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in rest) == more
    # A user's message is not the answer's.
    assert ask(server, CHAT, echo=True)["choices"] == ask(server, CHAT)["choices"]


def test_a_chat_scores_its_prompt(server: LiveServer) -> None:
    answer = ask(server, CHAT, prompt_logprobs=1, return_token_ids=True)
    rows, ids = answer["prompt_logprobs"], answer["prompt_token_ids"]
    assert rows[0] is None
    assert all(str(token) in row for token, row in zip(ids[1:], rows[1:], strict=True))
    refused = server.post(CHAT, messages=FRANCE, prompt_logprobs=1, stream=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
    whole = server.post(CHAT, messages=FRANCE, prompt_logprobs=-1)
    assert "prompt_logprobs must be at most" in whole.json()["error"]["message"]


def test_fields_without_effect_are_named_in_a_header(server: LiveServer) -> None:
    for path in (CHAT, TEXT, "/v1/responses", "/v1/messages"):
        given: dict[str, Any] = {"max_tokens": 1}
        if path == "/v1/responses":
            given = {"input": "Hi", "max_output_tokens": 1, "max_tool_calls": 3}
        elif path == TEXT:
            given |= {"prompt": PROMPT}
        else:
            given |= {"messages": FRANCE}
        for stream in (False, True):
            got = server.post(path, **given, stream=stream, request_id="r", stream_interval=None)
            assert "request_id" in got.headers["x-leadline-skipped"], path
            assert "stream_interval" not in got.headers["x-leadline-skipped"]
        assert "max_tool_calls" in got.headers["x-leadline-skipped"] or path != "/v1/responses"
    counted = server.post("/tokenize", prompt=PROMPT, mm_processor_kwargs={"x": 1})
    assert counted.headers["x-leadline-skipped"] == "mm_processor_kwargs"


def test_a_prompt_is_cut_on_either_side(server: LiveServer) -> None:
    ids = tokens(server, PROMPT)
    fields = {"return_token_ids": True, "truncate_prompt_tokens": 2}
    assert ask(server, TEXT, **fields)["choices"][0]["prompt_token_ids"] == ids[-2:]
    cut = ask(server, TEXT, **fields, truncation_side="right")
    assert cut["choices"][0]["prompt_token_ids"] == ids[:2]
