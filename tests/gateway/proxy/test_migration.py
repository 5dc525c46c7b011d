"""Streams whose pod dies: a real engine answers, and the connection to it is cut at a chosen event.

The cut is made by a pod that forwards to the engine; the second attempt goes to another forwarder of the same
engine, as if two engines of the same kind stood there. test_cut_streams.py has streams of every kind, cut at
every byte; test_real_engines.py kills whole engines.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from engines import Engine
from gateway_rig import (
    STREAM_HEAD,
    VERSION,
    Received,
    Rig,
    Script,
    ScriptedPod,
    answer,
    chunked,
    gateway_to,
    movable,
    pods,
    sse,
    until,
)

from leadline.gateway.request.body import read_incoming
from leadline.gateway.request.migration import MovableStream
from leadline.protocol.openai import ChatCompletionRequest
from live_valkey import PoolPod

PROMPT = "The first ten prime numbers are"
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "Count from one to ten in words."}],
    "stream": True,
    "max_tokens": 16,
}
TEXT: dict[str, Any] = {"model": "m", "prompt": PROMPT, "stream": True, "max_tokens": 16}
STRING = "string"
"""A stop to be found in the answer."""
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy chat": {**CHAT, "temperature": 0},
    "greedy chat with usage": {**CHAT, "temperature": 0, "stream_options": {"include_usage": True}},
    "chat with a stop string": {**CHAT, "temperature": 0, "stop": STRING},
    "sampled text": {**TEXT, "temperature": 0.9, "seed": 4},
    "chat that repeats its last message, with token ids": {
        **CHAT,
        "messages": [*CHAT["messages"], {"role": "assistant", "content": "One,"}],
        "continue_final_message": True,
        "echo": True,
        "return_token_ids": True,
        "temperature": 0,
    },
    "text with token ids": {**TEXT, "temperature": 0, "return_token_ids": True},
    "echoed text": {**TEXT, "temperature": 0, "echo": True, "max_tokens": 8},
    "a prompt that is echoed alone": {**TEXT, "echo": True, "max_tokens": 0},
}


class Cutter:
    """Forwards to an engine; the first completion is cut off after `after` events, the next ones after
    `again`."""

    def __init__(self, engine: Engine, after: int | None, again: int | None = None) -> None:
        self._engine = engine
        self._cuts = [after, again]
        self.bodies: list[Any] = []

    async def __call__(self, pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        if request.method == "GET":
            writer.write(answer(VERSION))
            return
        self.bodies.append(request.json)
        cut = self._cuts.pop(0) if self._cuts else None
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream("POST", self._engine.url + request.path, content=request.body) as got,
        ):
            writer.write(
                b"HTTP/1.1 %d X\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n"
                % (got.status_code, got.headers["content-type"].encode())
            )
            events = 0
            rest = b""
            async for data in got.aiter_bytes():
                rest += data
                while b"\n\n" in rest:
                    one, _, rest = rest.partition(b"\n\n")
                    if events == cut:
                        await writer.drain()
                        writer.transport.abort()
                        return
                    writer.write(chunked(one + b"\n\n"))
                    events += 1
            if rest:
                writer.write(chunked(rest))
            writer.write(b"0\r\n\r\n")


@asynccontextmanager
async def cut_stream(engine: Engine, *cuts: int | None) -> AsyncIterator[tuple[Rig, Cutter]]:
    cutter = Cutter(engine, *cuts)
    scripts: list[Script] = [cutter] * 3
    async with pods(*scripts) as three, gateway_to(*[pod.address for pod in three], migration="auto") as rig:
        yield rig, cutter


def path_of(body: dict[str, Any]) -> str:
    return "/v1/completions" if "prompt" in body else "/v1/chat/completions"


def events_of(text: str) -> list[Any]:
    found = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    return [event if event == "[DONE]" else json.loads(event) for event in found]


def told(events: list[Any]) -> dict[str, Any]:
    """What a client makes of a stream, whatever its cutting into chunks."""
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert len({chunk["created"] for chunk in chunks}) == 1
    assert not any("error" in chunk for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert {choice["index"] for choice in choices} == {0}
    finishes = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(finishes) == 1
    assert choices[-1]["finish_reason"]
    roles = [choice["delta"]["role"] for choice in choices if "role" in choice.get("delta", {})]
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    for usage in usages:
        assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
        del usage["prompt_tokens_details"]
    logprobs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    return {
        "text": "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices),
        "roles": roles,
        "finish": finishes[0],
        "stop_reason": [choice["stop_reason"] for choice in choices if "stop_reason" in choice],
        "usage": usages,
        "prompt_token_ids": [
            part["prompt_token_ids"] for part in (*chunks, *choices) if "prompt_token_ids" in part
        ],
        "token_ids": [token for choice in choices for token in choice.get("token_ids", [])],
        "logprobs": [
            *(entry["token"] for part in logprobs for entry in part.get("content") or []),
            *(token for part in logprobs for token in part.get("tokens", [])),
            *(offset for part in logprobs for offset in part.get("text_offset", [])),
        ],
    }


async def ask(url: str, body: dict[str, Any]) -> list[Any]:
    async with httpx.AsyncClient(timeout=60) as client:
        got = await client.post(url + path_of(body), json=body)
        assert got.status_code == 200, got.text
        return events_of(got.text)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
async def test_a_stream_that_is_cut_anywhere_reads_as_one_that_is_not(engine: Engine, name: str) -> None:
    body = VARIANTS[name]
    if stops := body.get("stop") == STRING:
        text = told(await ask(engine.url, {**body, "stop": None}))["text"]
        body = {**body, "stop": text[len(text) // 2 :][:5]}
    undisturbed = await ask(engine.url, body)
    wanted = told(undisturbed)
    assert wanted["finish"] == ("stop" if stops else "length")
    if "return_token_ids" not in body:
        assert wanted["token_ids"] == []
    assert len(wanted["prompt_token_ids"]) == ("return_token_ids" in body)
    last = len(undisturbed) + 1  # the engine sends more chunks when asked for token ids
    for cut in sorted({0, 1, 3, last // 2, last - 3, last - 2, last - 1}):
        async with cut_stream(engine, cut) as (rig, cutter):
            got = told(await ask(rig.url, body))
            assert got == wanted, f"cut after {cut} events"
            await rig.settled()
            assert 1 <= len(cutter.bodies) <= 2


async def test_a_connection_cut_at_any_byte_gives_the_stream_of_one_that_is_not() -> None:
    """Within the head, within the length of a chunk, within an event: raw bytes, through a whole gateway."""

    def words(begin: int) -> bytes:
        chunks = [{"index": 0, "text": f"{n} ", "token_ids": [n]} for n in range(begin, 2)]
        body = b"".join(chunked(sse({"id": "c", "created": 1, "choices": [chunk]})) for chunk in chunks)
        end = {"index": 0, "text": "", "finish_reason": "length"}
        body += chunked(sse({"id": "c", "created": 1, "choices": [end]})) + chunked(sse("[DONE]"))
        return STREAM_HEAD + body + b"0\r\n\r\n"

    cut: int | None = None

    async def script(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal cut
        at, cut = cut, None
        writer.write(words(len(request.json.get("resume_token_ids", ())))[:at])
        if at is not None:
            writer.write_eof()
            writer.close()

    one, other = movable(script), movable(script)
    async with (
        pods(one, other) as (a, b),
        gateway_to(a.address, b.address, migration="auto", breaker_failures=10**6) as rig,
        rig.client() as client,
    ):
        for at in range(len(words(0))):
            cut = at
            got = await client.post("/v1/completions", json=TEXT)
            assert cut is None
            events = events_of(got.text)
            said = [choice for event in events[:-1] for choice in event["choices"]]
            assert "".join(choice["text"] for choice in said) == "0 1 ", f"cut at byte {at}"
            assert [choice["finish_reason"] for choice in said if "finish_reason" in choice] == ["length"]
            assert events[-1] == "[DONE]"
        await rig.settled()


def test_a_stream_of_thoughts_moves() -> None:
    def chunk(*ids: int, **delta: str) -> bytes:
        return sse({"id": "c", "created": 1, "choices": [{"index": 0, "delta": delta, "token_ids": [*ids]}]})

    opening = sse({"id": "c", "created": 1, "choices": [{"index": 0, "delta": {"role": "assistant"}}]})
    stream = MovableStream(read_incoming(json.dumps(CHAT).encode(), kind=ChatCompletionRequest))
    sent = stream.push(opening + chunk(5, 6, reasoning="Two and", reasoning_content="Two and"))
    assert stream.movable
    assert stream.resume() == {"resume_token_ids": [5, 6]}
    sent += stream.push(opening + chunk(7, reasoning=" two") + chunk(8) + chunk(9, content="Four"))
    deltas = [event["choices"][0]["delta"] for event in events_of(sent.decode())]
    assert deltas == [
        {"role": "assistant"},
        {"reasoning": "Two and", "reasoning_content": "Two and"},
        {"reasoning": " two"},
        {"content": "Four"},
    ]
    assert stream.sent_tokens == 5


async def test_a_stream_may_move_more_than_once(engine: Engine) -> None:
    body = VARIANTS["greedy chat with usage"]
    wanted = told(await ask(engine.url, body))
    async with cut_stream(engine, 6, 5) as (rig, cutter):
        assert told(await ask(rig.url, body)) == wanted
        assert len(cutter.bodies) == 3
        assert await rig.metric("migrations_total", outcome="moved") == 2
        assert await rig.metric("completion_tokens_total") == 16
        resumed = [len(sent.get("resume_token_ids", [])) for sent in cutter.bodies]
        assert resumed[0] == 0 < resumed[1] < resumed[2]
        await rig.settled()


async def test_a_sampled_stream_gets_a_seed_and_goes_on_with_it(engine: Engine) -> None:
    body = {**CHAT, "temperature": 1.0}
    async with cut_stream(engine, 6) as (rig, cutter):
        got = told(await ask(rig.url, body))
        first, second = cutter.bodies
        assert first["seed"] == second["seed"]
        wanted = told(await ask(engine.url, {**body, "seed": first["seed"]}))
        assert got == wanted


async def test_only_streams_that_may_move_are_amended(engine: Engine) -> None:
    async with cut_stream(engine, None, None) as (rig, cutter):
        await ask(rig.url, VARIANTS["greedy chat"])
        several = {**CHAT, "n": 2, "temperature": 0}
        async with rig.client() as client:
            await client.post("/v1/chat/completions", json={**CHAT, "stream": False})
            await client.post("/v1/chat/completions", json=several)
        assert cutter.bodies[0].keys() - CHAT.keys() == {
            *("temperature", "return_token_ids", "return_prompt_token_ids", "seed")
        }
        assert cutter.bodies[1] == {**CHAT, "stream": False}
        assert cutter.bodies[2] == several


async def test_a_tool_call_continues_on_another_pod(engine: Engine) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    body = {**CHAT, "temperature": 0, "max_tokens": 60, "tools": [tool], "tool_choice": "required"}

    def calls(events: list[Any]) -> list[Any]:
        deltas = [chunk["choices"][0]["delta"] for chunk in events[:-1]]
        parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
        assert sum("role" in delta for delta in deltas) == 1
        assert sum("id" in part for part in parts if part["index"] == 0) == 1
        return [(part["index"], part["function"]) for part in parts]

    wanted = calls(await ask(engine.url, body))
    assert len(wanted) > 3
    for cut in (1, 3, 6, 12, 14):
        async with cut_stream(engine, cut) as (rig, _):
            assert calls(await ask(rig.url, body)) == wanted


async def test_a_stream_waits_for_its_only_pod_to_come_back(engine: Engine) -> None:
    body = VARIANTS["greedy chat"]
    wanted = told(await ask(engine.url, body))
    cutter = Cutter(engine, 5)
    async with pods(cutter) as (pod,), gateway_to(pod.address, migration="auto") as rig:
        port = int(pod.address.rpartition(":")[2])
        async with rig.client() as client, client.stream("POST", path_of(body), json=body) as got:
            text = ""
            async for piece in got.aiter_text():
                text += piece
                if pod._server is not None and pod._server.is_serving() and len(cutter.bodies) == 1:
                    pod._server.close()  # refuses connections from now on
                    asyncio.get_running_loop().call_later(0.5, _again, pod, port)
        assert told(events_of(text)) == wanted
        assert len(cutter.bodies) == 2
        await rig.settled()


def _again(pod: ScriptedPod, port: int) -> None:
    _restarts.append(asyncio.ensure_future(pod.start(port)))


_restarts: list[Any] = []


async def test_a_stream_that_nobody_can_continue_ends_with_an_error_event(engine: Engine) -> None:
    async with cut_stream(engine, 4, 0) as (rig, _):
        rig.pods["pod-1"].ready = rig.pods["pod-2"].ready = False
        rig.pods["pod-0"].terminating = False
        async with rig.client() as client, client.stream("POST", path_of(CHAT), json=CHAT) as got:
            pieces = got.aiter_text()
            text = await anext(pieces)
            rig.pods["pod-0"].terminating = True
            # No pod is left: the stream waits for one, and its deadline comes first.
            rig.gateway._proxy._dispatcher.settings = _hurried(rig)  # type: ignore[union-attr]
            text += "".join([piece async for piece in pieces])
        last = events_of(text)[-1]
        assert last["error"]["code"] == "upstream_lost"
        assert "[DONE]" not in text
        assert await rig.metric("migrations_total", outcome="failed") == 1
        await rig.settled()


def _hurried(rig: Rig) -> Any:
    from dataclasses import replace

    return replace(rig.gateway.settings, migration_wait=0.2)


async def test_what_comes_together_with_the_word_that_the_engine_is_gone_is_not_left_out() -> None:
    """A pod whose engine dies says so right behind the last tokens, often in the same piece."""

    def tokens(begin: int, end: int) -> bytes:
        chunks = [{"index": 0, "text": f"{n} ", "token_ids": [n]} for n in range(begin, end)]
        return b"".join(chunked(sse({"id": "c", "created": 1, "choices": [chunk]})) for chunk in chunks)

    async def dies_at_3(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        begin = len(request.json.get("resume_token_ids", ()))
        gone = sse({"error": {"message": "the engine is gone", "code": "engine_dead"}})
        last = chunked(sse("[DONE]")) if begin else chunked(gone)
        writer.write(STREAM_HEAD + tokens(begin, 5 if begin else 3) + last + b"0\r\n\r\n")

    async with (
        pods(movable(dies_at_3), movable(dies_at_3)) as (a, b),
        gateway_to(a.address, b.address, migration="auto") as rig,
    ):
        events = events_of((await rig.post(TEXT, path="/v1/completions")).text)
    assert events[-1] == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "0 1 2 3 4 "


async def test_a_pod_without_reports_is_asked_once_whether_its_streams_can_move() -> None:
    """A static list and no Redis. Streams of other engines are passed on as they are."""
    kinds = [answer(VERSION), answer(b'{"version":"0.11.0"}'), answer(b"none", status=404), answer(b"{")]
    for number, said in enumerate(kinds):
        asked = 0

        async def script(
            pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter, said: bytes = said
        ) -> None:
            nonlocal asked
            if request.method == "GET":
                asked += request.path == "/version"
                writer.write(said)
                return
            chunk = {"index": 0, "text": "a", "token_ids": [1]}
            writer.write(STREAM_HEAD + chunked(sse({"id": "c", "created": 1, "choices": [chunk]})))
            writer.write(chunked(sse("[DONE]")) + b"0\r\n\r\n")

        async with pods(script) as (pod,), gateway_to(pod.address, migration="auto") as rig:
            await asyncio.gather(*[rig.post(TEXT, path="/v1/completions") for _ in range(3)])
            await rig.post({**TEXT, "stream": False}, path="/v1/completions")
            assert asked == 1
            amended = ["return_token_ids" in one.json for one in pod.completions if one.json["stream"]]
            assert amended == [number == 0] * 3
            await rig.settled()


async def test_a_pod_that_was_lost_is_asked_again_since_another_engine_may_come_up() -> None:
    asked = 0

    async def script(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        if request.method == "GET":
            asked += 1
            writer.write(answer(VERSION if asked == 1 else b"none", status=200 if asked == 1 else 404))
            return
        writer.write(STREAM_HEAD + (b"zz" if asked == 1 else chunked(sse("[DONE]")) + b"0\r\n\r\n"))

    async with pods(script) as (pod,), gateway_to(pod.address, migration="auto", max_attempts=1) as rig:
        assert (await rig.post(TEXT, path="/v1/completions")).status_code == 502
        assert (await rig.post(TEXT, path="/v1/completions")).status_code == 200
        assert ["return_token_ids" in one.json for one in pod.completions] == [True, False]
        await rig.settled()


async def test_a_stream_begun_before_the_first_report_of_its_pod_is_not_moved() -> None:
    """Its token ids were not asked for then: another pod would begin again at the first word."""
    heard = asyncio.Event()

    async def dies(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        if request.method == "GET":
            writer.write(answer(b"no such path", status=404))
            return
        await heard.wait()
        chunk = {"id": "c", "created": 1, "choices": [{"index": 0, "text": "Once"}]}
        writer.write(STREAM_HEAD + chunked(sse(chunk)) + b"zz")

    async with pods(dies, dies) as (a, b), gateway_to(a.address, b.address, migration="auto") as rig:
        asked = asyncio.ensure_future(rig.post(TEXT, path="/v1/completions"))
        await until(lambda: a.completions or b.completions)
        for pod in rig.pods.values():
            pod.heartbeat(PoolPod("redis://nowhere").report(), time.monotonic())
        heard.set()
        first, last = events_of((await asked).text)
    assert first["choices"][0]["text"] == "Once"
    assert last["error"]["code"] == "upstream_lost"


@pytest.mark.parametrize("code", [502, 503, 504])
async def test_a_stream_waits_for_a_pod_behind_a_proxy_that_speaks_for_it(
    code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A sidecar answers for an engine that is not there yet; Linkerd's with 502 or 504."""
    refusals = [code, code]

    async def script(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        begin = len(request.json.get("resume_token_ids", ()))
        if begin and refusals:
            writer.write(answer(b"not there yet", status=refusals.pop()))
            return
        chunk = {"index": 0, "text": f"{begin} ", "token_ids": [begin]}
        writer.write(STREAM_HEAD + chunked(sse({"id": "c", "created": 1, "choices": [chunk]})))
        writer.write(chunked(sse("[DONE]")) + b"0\r\n\r\n" if begin else b"zz")

    async with pods(movable(script)) as (pod,), gateway_to(pod.address, migration="auto") as rig:
        events = events_of((await rig.post(TEXT, path="/v1/completions")).text)
    assert events[-1] == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "0 1 "
    assert "does not go on" not in caplog.text  # it did, and hundreds of streams may wait
