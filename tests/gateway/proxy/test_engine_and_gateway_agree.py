"""Engine and gateway answer the same bytes with the same status: each odd request goes to both.

A row is (method, path, body, status). A new kind of odd request is a row here, whichever of the two it was
found at.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import BLOCK, Engine
from gateway_rig import gateway_to, until

from leadline.gateway.tokens.service import TokenService
from leadline.protocol.load import LoadReport

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "Hi"}]
Row = tuple[str, str, bytes, int]


def text(status: int, **fields: Any) -> Row:
    return "POST", TEXT, json.dumps({"model": "m", "prompt": "Hi", "max_tokens": 1} | fields).encode(), status


def chat(status: int, **fields: Any) -> Row:
    return "POST", CHAT, json.dumps({"model": "m", "messages": HI, "max_tokens": 1} | fields).encode(), status


def message(status: int, **fields: Any) -> Row:
    body = {"model": "m", "messages": HI, "max_tokens": 1} | fields
    return "POST", MESSAGES, json.dumps(body).encode(), status


def response(status: int, **fields: Any) -> Row:
    body = {"model": "m", "input": "Hi", "max_output_tokens": 1} | fields
    return "POST", RESPONSES, json.dumps(body).encode(), status


def count(status: int, **fields: Any) -> Row:
    return "POST", COUNT, json.dumps({"model": "m", "messages": HI} | fields).encode(), status


def raw(status: int, body: bytes, path: str = TEXT) -> Row:
    return "POST", path, body, status


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


GOOD = b'{"model":"m","prompt":"Hi","max_tokens":1}'
BODIES = [
    *(raw(400, body) for body in (b"", b" ", b"{", b"[]", b"null", b'"a"', b"7", b"{}", b"\xff\xfe{}")),
    *(
        raw(400, body)
        for body in (GOOD + b"}", GOOD + b" x", b"\xef\xbb\xbf" + GOOD, GOOD.decode().encode("utf-16"))
    ),
    *(
        raw(400, body)
        for body in (b"[" * 100_000, b'{"a":' * 100_000, b'{"model":"m","prompt":"Hi","x":' + b"[" * 9999)
    ),
    *(raw(400, body) for body in (rb'{"model":"m","prompt":"\ud800"}', rb'{"prompt":"a","model":"\ud800"}')),
    raw(400, b'{"model":"m","prompt":"\xed\xa0\x80"}'),
    raw(400, b'{"model":"m","prompt":"Hi","temperature":NaN}'),
    raw(400, b'{"model":"m","prompt":"Hi","temperature":Infinity,"n":"x"}'),
    raw(200, GOOD[:-1] + b',"model":"m","max_tokens":1}'),
    raw(200, b"\r\n\t " + GOOD + b" \n"),
    raw(400, b'{"model":"m","prompt":"Hi","max_tokens":1,}'),
    raw(400, b"{'model':'m','prompt':'Hi'}"),
]
FIELDS = [
    *(text(404, model=name) for name in ("other", "", "m ", "M", "m\x00", "x" * 5000)),
    *(text(400, model=name) for name in (5, ["m"], {})),
    text(200, model=None),
    *(text(400, n=n) for n in (0, -1, "2", 1.5, True, 10**30, 129, [])),
    *(text(200, n=n) for n in (1, 1.0, None)),
    *(text(400, max_tokens=limit) for limit in (0, -2, "3", 2.5, True)),
    *(text(200, max_tokens=limit) for limit in (1, 1.0)),
    text(200, max_tokens=-1, stop_token_ids=list(range(40000))),
    chat(400, max_tokens=0),
    chat(200, max_completion_tokens=-1, stop_token_ids=list(range(40000))),
    *(text(400, temperature=value) for value in (-1, 3, "hot", 10**400)),
    *(text(400, top_p=value) for value in (-0.1, 1.1)),
    text(200, top_p=0),
    *(text(400, stop=value) for value in ([""], 5, ["x"] * 65)),
    *(text(200, stop=value) for value in ("", [], None)),
    *(text(400, deadline=value) for value in (-1, 0, "1", [])),
    *(text(400, queue_timeout=value) for value in (-1, "1")),
    *(
        text(400, **{name: "royal"})
        for name in ("priority_class", "seed", "stream", "echo", "n", "logit_bias")
    ),
    *(text(400, seed=value) for value in (2**63, -(2**63) - 1, 1.5)),
    text(200, seed=2**63 - 1),
    text(400, stream_options={"include_usage": True}),
    text(400, logit_bias={"not_a_token_id": 1}),
    text(400, logit_bias={"1000000": 1}),
    text(400, response_format={"type": "xml"}),
    text(400, regex="(unclosed"),
    text(400, guided_json="no object"),
    *(text(200, allowed_token_ids=ids) for ids in ([5, 7], None)),
    *(text(400, allowed_token_ids=ids) for ids in ([], [-1], ["a"], [1_000_000], 5)),
    *(text(200, bad_words=words) for words in (["Hi", " there"], [], None)),
    *(text(400, bad_words=words) for words in ([""], [" "], "Hi", [5], ["a"] * 1025, ["word " * 65])),
    chat(400, bad_words=["Hi"], regex="Hi"),
    chat(400, allowed_token_ids=[5], min_tokens=1, stop_token_ids=[5]),
    text(400, guided_choice=["a"], regex="a"),
    text(200, stream_interval=5, length_penalty=2, truncate_prompt_tokens=1, truncation_side="right"),
    *(text(400, **{name: 5}) for name in ("watermarking", "kv_transfer_params", "truncation_side")),
    text(400, thinking_token_budget=5),
    chat(200, add_special_tokens=True, include_reasoning=False, thinking_token_budget=-1),
    text(400, best_of=129),
    text(400, best_of=1, n=2),
    text(400, suffix="x"),
    text(400, cache_salt="x" * 2000),
    text(400, user=5),
    text(400, resume_token_ids=[1_000_000]),
    text(400, return_token_ids="yes"),
    text(200, unknown_field={"deep": [1]}),
    *(
        text(400, prompt=prompt)
        for prompt in ("", [], [""], [[]], ["a", 1], [1_000_000], [-1], [1.5], 5, None)
    ),
    *(text(200, prompt=prompt) for prompt in ([5.0, 6.0], ["a"], [[5]])),
    text(400, prompt="word " * 4000),
    text(400, prompt=[5] * 1024),
    text(400, prompt=["a"] * 3000),
    *(
        chat(400, messages=messages)
        for messages in ([], None, "Hi", [5], [{"role": "king", "content": "Hi"}])
    ),
    *(
        chat(400, messages=[{"role": "user", "content": content}])
        for content in (None, 5, [{"type": "image_url"}])
    ),
    chat(400, messages=[{"role": "user", "content": "word " * 4000}]),
    chat(200, messages=[*HI, {"role": "function", "name": "f", "content": "x"}]),
    chat(400, top_logprobs=2),
    chat(400, logprobs=True, top_logprobs=99),
    chat(400, functions=[function("f")]),
    chat(400, tool_choice="required"),
    chat(400, tools=[function("f"), function("f")]),
    chat(400, tools=[{"type": "web_search"}]),
    chat(200, tools=[{"type": "custom", "custom": {"name": "f"}}]),
    chat(400, tools=[function("f")], tool_choice=function("g")),
    chat(
        400,
        tools=[function("f")],
        tool_choice={"type": "allowed_tools", "allowed_tools": {"tools": [function("g")]}},
    ),
    chat(400, chat_template_kwargs={"messages": []}),
    *(chat(200, echo=echo) for echo in (True, None)),
    chat(400, echo="yes"),
    chat(200, prompt_logprobs=2, return_token_ids=True),
    *(chat(400, prompt_logprobs=count) for count in (-2, 99, -1, "2")),
    chat(400, prompt_logprobs=1, stream=True),
    chat(400, stream="yes"),
]
IMAGE = [{"role": "user", "content": [{"type": "image"}]}]
SCHEMA: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
OF_MESSAGES = [
    *(raw(400, body, path) for body in (b"", b"{", b"[]", b"{}", b"\xff") for path in (MESSAGES, COUNT)),
    message(200),
    message(200, tools=[SCHEMA, {"type": "web_search_20250305", "name": "web_search"}]),
    message(400, max_tokens=None),
    message(400, messages=IMAGE),
    message(400, tools=[{"name": "f"}]),
    message(400, tools=[SCHEMA, SCHEMA]),
    message(400, tools=[{**SCHEMA, "input_schema": {"type": "nonsense"}}], tool_choice={"type": "any"}),
    message(400, tool_choice={"type": "any"}),
    message(400, messages=[{"role": "user", "content": "word " * 4000}]),
    message(400, stop_sequences=["x"] * 65),
    message(200, bad_words=["Hi"], allowed_token_ids=[5, 7], presence_penalty=1, frequency_penalty=-1),
    message(400, presence_penalty=3),
    *(message(400, **{name: value}) for name, value in {"n": 2, "stop": ["x"], "logprobs": True}.items()),
    message(400, response_format={"type": "json_object"}),
    message(404, model="other"),
    count(200),
    count(200, messages=[{"role": "user", "content": "word " * 4000}]),
    count(400, messages=IMAGE),
    count(404, model="other"),
    ("GET", MESSAGES, b"", 405),
    ("GET", COUNT, b"", 405),
    ("POST", MESSAGES + "/batches", b"{}", 404),
]
OF_RESPONSES = [
    *(raw(400, body, RESPONSES) for body in (b"", b"{", b"[]", b"{}", b"\xff")),
    response(200),
    *(response(400, **{name: value}) for name, value in {"n": 2, "max_tokens": 5, "messages": HI}.items()),
    response(400, response_format={"type": "json_object"}),
    response(400, reasoning_effort="low"),
    response(200, n=1, response_format=None, allowed_token_ids=[5, 7], bad_words=["Hi"]),
    response(200, max_tool_calls=1, structured_outputs={"choice": ["a"]}, include_reasoning=False),
    response(400, vllm_xargs={"a": 1}),
    response(404, model="other"),
]
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


def tokens(status: int, path: str = TOKENIZE, **fields: Any) -> Row:
    return "POST", path, json.dumps(fields).encode(), status


OF_TOKENS = [
    *(raw(400, body, path) for body in (b"", b"{", b"[]", b"{}", b"\xff") for path in (TOKENIZE, DETOKENIZE)),
    tokens(200, prompt="Hi there, Ångström 日本"),
    tokens(200, prompt=""),
    tokens(200, model="m", prompt="Hi", add_special_tokens=False, return_token_strs=True),
    tokens(200, messages=HI, return_token_strs=True),
    tokens(200, messages=[*HI, {"role": "assistant", "content": "Su"}], continue_final_message=True),
    tokens(200, messages=HI, add_generation_prompt=False),
    tokens(200, prompt="word " * 4000),
    tokens(404, model="other", prompt="Hi"),
    tokens(400, prompt="Hi", messages=HI),
    tokens(400, prompt=5),
    tokens(400, messages=[{"role": "king", "content": "Hi"}]),
    tokens(400, messages=HI, chat_template_kwargs={"messages": []}),
    tokens(200, DETOKENIZE, tokens=[5, 6, 49000]),
    tokens(200, DETOKENIZE, tokens=[5] * 20_000),
    tokens(200, DETOKENIZE, model="m", tokens=[]),
    tokens(400, DETOKENIZE, tokens=[1_000_000]),
    tokens(400, DETOKENIZE, tokens=[-1]),
    tokens(400, DETOKENIZE, tokens="Hi"),
    tokens(404, DETOKENIZE, model="other", tokens=[5]),
    ("GET", TOKENIZE, b"", 405),
    ("GET", "/tokenizer_info", b"", 404),
]
PATHS = [
    ("GET", CHAT, b"", 405),
    ("PUT", TEXT, GOOD, 405),
    ("POST", "/v1/models", GOOD, 405),
    ("GET", "/v1/models/m", b"", 200),
    ("GET", "/v1/models/other", b"", 404),
    ("GET", "/nowhere", b"", 404),
    ("POST", "/v1/chat/completion", GOOD, 404),
    ("POST", "/chat/completions", GOOD, 404),
    ("POST", TEXT + "?a=b", GOOD, 200),
    ("POST", "/v1/%63ompletions", GOOD, 200),
]


@pytest.mark.parametrize("matching", ["text", "tokens"])
async def test_an_odd_request_has_one_status(engine: Engine, model_folder: Path, matching: str) -> None:
    exact = {"tokenizer": "auto", "model": str(model_folder), "block_size": BLOCK}
    differences = []
    async with gateway_to(engine.address, service=exact if matching == "tokens" else {}) as rig:
        if matching == "tokens":
            service = rig.gateway.table.get("default/m")
            assert service is not None
            await until(lambda: isinstance(service.tokens, TokenService), 60)
            for pod in service.pods.values():  # as its heartbeats through Redis would
                pod.report = LoadReport(
                    pod=pod.id,
                    address=pod.address,
                    epoch="e",
                    time=0.0,
                    model="m",
                    block_size=BLOCK,
                    max_model_len=1024,
                )
        async with httpx.AsyncClient(timeout=60) as client:
            for method, path, body, status in (
                *BODIES,
                *FIELDS,
                *OF_MESSAGES,
                *OF_RESPONSES,
                *OF_TOKENS,
                *PATHS,
            ):
                there = await client.request(method, engine.url + path, content=body)
                here = await client.request(method, rig.url + path, content=body)
                what = f"{method} {path} {body[:100]!r} … {len(body)}"
                if not there.status_code == here.status_code == status:
                    differences.append((what, status, there.status_code, here.status_code, here.text[:200]))
                elif status >= 400 and (told(there) != told(here)):
                    differences.append((what, status, told(there), told(here), here.text[:200]))
                elif status == 200 and path in (COUNT, TOKENIZE, DETOKENIZE):
                    local = "x-leadline-pod" not in here.headers
                    if here.content != there.content or local != (matching == "tokens"):
                        shown = (there.text[:200], here.text[:200], "local" if local else "pod")
                        differences.append((what, status, *shown))
        await rig.settled()
    assert not differences, "\n".join(map(str, differences))


def told(response: httpx.Response) -> tuple[Any, ...]:
    error = response.json()["error"]
    return error["type"], error.get("param"), error.get("code"), set(response.json())
