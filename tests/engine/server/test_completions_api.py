"""`/v1/completions` through OpenAI's own client: prompts in every form, echo, logprobs, n, best_of, seeds."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import BLOCK, CONTEXT, LiveServer

PROMPT = "The largest planet of the solar system is"


def create(server: LiveServer, **more: Any) -> Any:
    options: dict[str, Any] = {"model": "smollm2", "prompt": PROMPT, "temperature": 0, "max_tokens": 6}
    extra = {
        key: more.pop(key) for key in ("return_token_ids", "prompt_logprobs", "ignore_eos") if key in more
    }
    return server.client.completions.create(**{**options, **more}, extra_body=extra)


def tokens_of(server: LiveServer, text: str) -> list[int]:
    tokens: list[int] = server.post("/tokenize", prompt=text).json()["tokens"]
    return tokens


def test_text_and_its_token_ids_give_the_same_completion(server: LiveServer) -> None:
    text = create(server).choices[0].text
    assert text
    assert create(server, prompt=tokens_of(server, PROMPT)).choices[0].text == text


def test_several_prompts_are_answered_in_order(server: LiveServer) -> None:
    prompts = [PROMPT, "Once upon a time", "1, 2, 3, 4,"]
    alone = [create(server, prompt=prompt).choices[0].text for prompt in prompts]
    together = create(server, prompt=prompts)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.text for choice in together.choices] == alone
    as_ids = create(server, prompt=[tokens_of(server, prompt) for prompt in prompts])
    assert [choice.text for choice in as_ids.choices] == alone


def test_n_choices_of_several_prompts_are_numbered_prompt_by_prompt(server: LiveServer) -> None:
    answer = create(server, prompt=["A B C", "1 2 3"], n=2, temperature=0, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text
    assert answer.choices[2].text == answer.choices[3].text
    assert answer.usage.completion_tokens == 8


def test_a_stream_adds_up_to_the_whole_answer(server: LiveServer) -> None:
    whole = create(server)
    text, finish = "", None
    usage = None
    for chunk in create(server, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.text
            finish = choice.finish_reason or finish
    assert text == whole.choices[0].text
    assert finish == whole.choices[0].finish_reason == "length"
    assert usage.completion_tokens == whole.usage.completion_tokens == 6


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_in_front(server: LiveServer, stream: bool) -> None:
    answer = create(server, echo=True, stream=stream)
    text = "".join(c.choices[0].text for c in answer) if stream else answer.choices[0].text
    assert text == PROMPT + create(server).choices[0].text


def test_echo_with_logprobs_scores_prompt_and_answer(server: LiveServer) -> None:
    answer = create(server, echo=True, logprobs=2, max_tokens=3)
    columns = answer.choices[0].logprobs
    ids = tokens_of(server, PROMPT)
    assert len(columns.tokens) == len(ids) + 3
    assert len(columns.token_logprobs) == len(columns.top_logprobs) == len(columns.text_offset)
    assert columns.token_logprobs[0] is None
    assert all(value <= 0 for value in columns.token_logprobs[1:])
    text = answer.choices[0].text
    for token, offset in zip(columns.tokens, columns.text_offset, strict=True):
        assert text[offset : offset + len(token)] == token


@pytest.mark.parametrize("count", [0, 1])
def test_top_logprobs_hold_the_token_that_stands_there(server: LiveServer, count: int) -> None:
    """However unlikely it is: one draw at a high temperature."""
    answer = create(server, echo=True, logprobs=count, temperature=2, seed=3, max_tokens=4)
    columns = answer.choices[0].logprobs
    rows = list(zip(columns.tokens, columns.token_logprobs, columns.top_logprobs, strict=True))[1:]
    for token, logprob, top in rows:
        assert logprob <= top[token]
        assert 1 <= len(top) <= count + 1
    assert any(len(top) == count + 1 for _, _, top in rows)


@pytest.mark.parametrize("echo", [True, False])
def test_tokens_that_are_half_a_character_have_entries_of_their_own(server: LiveServer, echo: bool) -> None:
    """As text they all read alike, and one of them stood for all."""
    count = 5
    answer = create(
        server, prompt="東京は日本の", echo=echo, logprobs=count, max_tokens=8, temperature=1, seed=1
    )
    columns = answer.choices[0].logprobs
    rows = list(zip(columns.tokens, columns.token_logprobs, columns.top_logprobs, strict=True))[echo:]
    assert any(key.startswith("bytes:\\x") for _, _, top in rows for key in top)
    for token, logprob, top in rows:
        assert top[token] == logprob
        ranked = sorted(top.values(), reverse=True)
        assert len(top) == count + (logprob < ranked[count - 1]), "all that was asked for, and the chosen one"
    data = b"".join(
        bytes.fromhex(token[6:].replace("\\x", "")) if token.startswith("bytes:") else token.encode()
        for token in columns.tokens
    )
    assert data.decode("utf-8", "replace").rstrip("\ufffd") == answer.choices[0].text.rstrip("\ufffd")


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_choices_with_echo_and_logprobs_stream_as_they_are_whole(
    server: LiveServer, warm: bool, max_tokens: int
) -> None:
    """`warm`: all but the prompt's last token is cached, so the other choices come before its scores."""
    prompt = tokens_of(server, f"{PROMPT} Saturn. " * 6)[: 3 * BLOCK + 1]
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "prompt_logprobs": 1, "n": 3, "seed": 4}
    body |= {"temperature": 1, "max_tokens": max_tokens}
    whole = create(server, **body)
    if not warm:
        server.post("/admin/reset_prefix_cache")
    columns: list[dict[str, list[Any]]] = [{} for _ in range(3)]
    texts, rows = ["", "", ""], [None, None, None]
    for chunk in create(server, **body, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        rows[choice.index] = choice.model_dump().get("prompt_logprobs") or rows[choice.index]
        for name, column in choice.logprobs.model_dump().items() if choice.logprobs else ():
            columns[choice.index].setdefault(name, []).extend(column)
    for index, choice in enumerate(whole.choices):
        assert texts[index] == choice.text
        assert columns[index]["tokens"] == choice.logprobs.tokens
        assert columns[index]["text_offset"] == choice.logprobs.text_offset
        scores = zip(columns[index]["token_logprobs"], choice.logprobs.token_logprobs, strict=True)
        assert all(a == b or a == pytest.approx(b, abs=1e-4) for a, b in scores)
        assert len(rows[index] or []) == len(prompt)


def test_every_choice_of_an_echoed_prompt_has_the_prompts_logprobs(server: LiveServer) -> None:
    """All but its last token is cached, so the second choice answers before the first has scored it."""
    prompt = tokens_of(server, f"{PROMPT} Jupiter. " * 6)[: 3 * BLOCK + 1]
    create(server, prompt=prompt, max_tokens=1)
    answer = create(server, prompt=prompt, echo=True, logprobs=1, n=2, max_tokens=2)
    first, second = (choice.logprobs for choice in answer.choices)
    assert len(first.tokens) == len(prompt) + 2
    assert second.tokens == first.tokens
    assert second.text_offset == first.text_offset
    assert second.token_logprobs[:-2] == first.token_logprobs[:-2]


def test_max_tokens_0_with_echo_scores_the_prompt_alone(server: LiveServer) -> None:
    answer = create(server, echo=True, logprobs=0, max_tokens=0)
    assert answer.choices[0].text == PROMPT
    assert len(answer.choices[0].logprobs.tokens) == len(tokens_of(server, PROMPT))
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 0


def test_logprobs_asked_twice_are_the_same_whatever_is_cached(server: LiveServer) -> None:
    """E13: the prompt is several blocks long, and its blocks are in the prefix cache the second time."""
    prompt = f"{PROMPT} Jupiter. " * 6
    assert len(tokens_of(server, prompt)) > 3 * BLOCK
    server.post("/admin/reset_prefix_cache")
    plain = create(server, prompt=prompt, max_tokens=2)
    assert plain.usage.prompt_tokens_details.cached_tokens == 0
    answers = [
        create(server, prompt=prompt, echo=True, logprobs=3, prompt_logprobs=2, max_tokens=2)
        for _ in range(2)
    ]
    first, second = (answer.choices[0].model_dump() for answer in answers)
    assert first["text"] == second["text"] == prompt + plain.choices[0].text
    assert first["logprobs"]["tokens"] == second["logprobs"]["tokens"]
    for a, b in zip(first["logprobs"]["token_logprobs"], second["logprobs"]["token_logprobs"], strict=True):
        assert a == b or a == pytest.approx(b, abs=1e-4)
    ids = tokens_of(server, prompt)
    assert len(first["prompt_logprobs"]) == len(second["prompt_logprobs"]) == len(ids)
    assert first["prompt_logprobs"][0] is None
    assert all(str(token) in row for token, row in zip(ids[1:], second["prompt_logprobs"][1:], strict=True))


def test_the_fields_of_vllms_clients_are_served(server: LiveServer) -> None:
    def ask(**fields: Any) -> Any:
        body = {"model": "smollm2", "prompt": PROMPT, "temperature": 0, "max_tokens": 8, **fields}
        answer = server.post("/v1/completions", **body).json()
        assert "choices" in answer, answer
        return answer

    for constraint in (
        {"guided_choice": ["Jupiter", "Saturn"]},
        {"structured_outputs": {"choice": ["Jupiter", "Saturn"]}},
        {"guided_grammar": 'root ::= planet\nplanet ::= "Jupiter" | "Saturn"'},
        {"structured_outputs": {"regex": "Jupiter|Saturn"}},
    ):
        assert ask(**constraint)["choices"][0]["text"] in ("Jupiter", "Saturn"), constraint
    ids = tokens_of(server, PROMPT)
    last = ask(prompt=ids[-3:])
    cut = ask(truncate_prompt_tokens=3)
    assert (cut["usage"]["prompt_tokens"], cut["choices"]) == (3, last["choices"])
    named = ask(logprobs=1, echo=True, return_tokens_as_token_ids=True, max_tokens=1)["choices"][0]
    assert named["logprobs"]["tokens"][:-1] == [f"token_id:{token}" for token in ids]
    assert all(key.startswith("token_id:") for key in named["logprobs"]["top_logprobs"][-1])


def test_best_of_returns_the_likeliest_choices(server: LiveServer) -> None:
    answer = create(server, best_of=4, n=2, temperature=1.2, seed=5, logprobs=0)
    scores = [sum(choice.logprobs.token_logprobs) for choice in answer.choices]
    everything = create(server, n=4, temperature=1.2, seed=5, logprobs=0)
    best = sorted((sum(choice.logprobs.token_logprobs) for choice in everything.choices), reverse=True)
    assert scores == pytest.approx(best[:2], abs=1e-3)
    assert answer.usage.completion_tokens == everything.usage.completion_tokens


def test_best_of_ranks_by_log_probability_per_token(server: LiveServer) -> None:
    """By their sum, the answer that ends first would win."""
    body = {"temperature": 0.8, "seed": 9, "logprobs": 0, "stop": ["."], "max_tokens": 8}
    choices = create(server, n=4, **body).choices
    scores = [choice.logprobs.token_logprobs for choice in choices]
    likeliest = max(range(4), key=lambda i: sum(scores[i]) / len(scores[i]))
    assert likeliest != max(range(4), key=lambda i: sum(scores[i])), "another seed is needed"
    assert create(server, best_of=4, **body).choices[0].text == choices[likeliest].text


def test_a_seed_gives_the_same_draws_alone_and_in_a_batch(server: LiveServer) -> None:
    """E25."""
    body = {"temperature": 1.0, "seed": 1234, "max_tokens": 8}
    alone = create(server, **body).choices[0].text
    batch = create(server, prompt=["Once upon a time", PROMPT, "def main():"], **body)
    assert batch.choices[1].text == alone
    assert create(server, **body).choices[0].text == alone
    assert create(server, **{**body, "seed": 99}).choices[0].text != alone


def test_a_tiny_temperature_is_greedy(server: LiveServer) -> None:
    """E14."""
    assert create(server, temperature=1e-5).choices[0].text == create(server).choices[0].text


def test_a_prompt_of_whole_blocks_that_is_all_cached_answers_the_same(server: LiveServer) -> None:
    """E6."""
    ids = (tokens_of(server, PROMPT) * 20)[: 4 * BLOCK]
    server.post("/admin/reset_prefix_cache")
    first, second = create(server, prompt=ids), create(server, prompt=ids)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert 2 * BLOCK < second.usage.prompt_tokens_details.cached_tokens < 4 * BLOCK
    assert first.choices[0].text == second.choices[0].text


def test_max_tokens_absent_runs_up_to_the_context_limit(server: LiveServer) -> None:
    """E5."""
    ids = (tokens_of(server, PROMPT) * 100)[: CONTEXT - 4]
    answer = server.post("/v1/completions", prompt=ids, ignore_eos=True, temperature=0).json()
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_longest_prompt_that_fits_gets_one_token(server: LiveServer) -> None:
    """E3."""
    ids = (tokens_of(server, PROMPT) * 100)[: CONTEXT - 1]
    answer = create(server, prompt=ids, max_tokens=50)
    assert answer.usage.completion_tokens == 1
    assert answer.choices[0].finish_reason in ("length", "stop")
