"""The gateway before two real engines: same answers, warm prefixes, engines killed, frozen and restarted."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from engines import BLOCK, Engine, engines
from gateway_rig import Rig, gateway_to, until

from leadline.gateway.tokens.service import TokenService

pytestmark = pytest.mark.slow

ASK: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "Name three rivers of Europe."}],
    "temperature": 0,
    "max_tokens": 24,
}


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Engine]]:
    with engines(2) as two:
        yield two


@pytest.fixture(autouse=True)
def _both_run(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines that a test killed are there again for the next one."""
    yield
    for engine in request.getfixturevalue("pair"):
        if engine.process is None or engine.process.poll() is not None:
            engine.start()
            engine.wait_ready()


def to(pair: list[Engine], **options: Any) -> Any:
    return gateway_to(*[engine.address for engine in pair], migration="auto", **options)


def exact(folder: Path) -> dict[str, Any]:
    """The gateway tokenizes as the engines do."""
    return {"service": {"tokenizer": "auto", "model": str(folder), "block_size": BLOCK}}


async def exact_tokens(rig: Rig) -> None:
    service = rig.gateway.table.get("default/m")
    assert service is not None
    await until(lambda: isinstance(service.tokens, TokenService), 30)


def without_identity(text: str) -> list[Any]:
    """Events of a stream, less what differs from request to request."""
    events = []
    for line in text.split("\n\n"):
        if line and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            del event["id"], event["created"]
            events.append(event)
    return events


async def test_answers_are_those_of_the_engine(pair: list[Engine]) -> None:
    async with to(pair) as rig, httpx.AsyncClient(timeout=60) as direct:
        for path, body in (
            ("/v1/chat/completions", ASK),
            ("/v1/completions", {"model": "m", "prompt": "Rivers:", "temperature": 0, "max_tokens": 12}),
        ):
            there = (await direct.post(pair[0].url + path, json=body)).json()
            here = (await rig.post(body, path)).json()
            assert here["choices"] == there["choices"]
            assert here["usage"]["total_tokens"] == there["usage"]["total_tokens"]
            streamed = {**body, "stream": True}
            there_events = without_identity((await direct.post(pair[0].url + path, json=streamed)).text)
            here_events = without_identity((await rig.post(streamed, path)).text)
            assert here_events == there_events
        refused = await rig.post({**ASK, "temperature": 9})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "temperature"


async def test_the_openai_client_works_through_the_gateway(pair: list[Engine]) -> None:
    async with to(pair) as rig:
        client = openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="any", max_retries=0, timeout=60)
        assert [model.id async for model in client.models.list()] == ["m"]
        whole = await client.chat.completions.create(**ASK)
        text = ""
        usage = None
        async for chunk in await client.chat.completions.create(
            **ASK, stream=True, stream_options={"include_usage": True}
        ):
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            usage = chunk.usage or usage
        assert text == whole.choices[0].message.content
        assert usage is not None
        assert whole.usage is not None
        assert usage.completion_tokens == whole.usage.completion_tokens
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(**{**ASK, "model": "other"})
        await client.close()


async def test_the_next_turn_goes_to_the_engine_that_has_the_last_one(
    pair: list[Engine], model_folder: Path
) -> None:
    """And what was predicted is what the engine had (P21)."""
    async with to(pair, **exact(model_folder)) as rig:
        await exact_tokens(rig)
        await until_agreed(rig)
        for number in range(4):
            talk = [
                {"role": "system", "content": f"You are clerk number {number}. " + "Be brief. " * 30},
                {"role": "user", "content": "Say yes."},
            ]
            body = {**ASK, "max_tokens": 4, "messages": talk}
            first = await rig.post(body)
            before = await rig.metric("actual_cached_tokens_total")
            predicted_before = await rig.metric("predicted_cached_tokens_total")
            answer = first.json()["choices"][0]["message"]
            body["messages"] = [*talk, answer, {"role": "user", "content": "Say no."}]
            second = await rig.post(body, headers={"X-Leadline-Explain": "1"})
            assert second.headers["x-leadline-pod"] == first.headers["x-leadline-pod"]
            why = json.loads(second.headers["x-leadline-explain"])
            assert why["exact"] is True
            rows = {row["pod"]: row["matched_tokens"] for row in why["pods"]}
            matched = rows[why["pod"]]
            usage = second.json()["usage"]
            assert usage["prompt_tokens"] == why["prompt_tokens"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert matched >= 96
            assert matched <= cached < matched + 2 * BLOCK  # the engine has the answer as well
            await until(lambda: rig.gateway.in_flight == 0)
            assert await rig.metric("actual_cached_tokens_total") - before == cached
            assert await rig.metric("predicted_cached_tokens_total") - predicted_before == matched


async def until_agreed(rig: Rig) -> None:
    for _ in range(300):
        if await rig.metric("tokenizer_agrees", service="default/m") == 1:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the tokenizers were not found to agree")


async def kill_in_mid_stream(
    rig: Rig,
    pair: list[Engine],
    body: dict[str, Any],
    how: int,
    part: str = "engine",
    path: str = "/v1/chat/completions",
) -> str:
    """Stop the engine that answers after some tokens; what the client got in all."""
    async with rig.client() as client, client.stream("POST", path, json=body) as got:
        assert got.status_code == 200
        number = int(got.headers["x-leadline-pod"].removeprefix("pod-"))
        text, pieces = "", got.aiter_text()
        while text.count("data: ") < 8:
            text += await anext(pieces)
        pair[number].signal(how, part)
        async for piece in pieces:
            text += piece
    return text


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 5}], ids=str)
async def test_a_stream_outlives_an_engine_that_is_killed(
    pair: list[Engine], sampling: dict[str, Any]
) -> None:
    body = {**ASK, **sampling, "max_tokens": 60, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    async with to(pair) as rig:
        undisturbed = without_identity((await rig.post(body)).text)
        text = await kill_in_mid_stream(rig, pair, body, signal.SIGKILL)
        events = without_identity(text)
        for usage in (events[-1]["usage"], undisturbed[-1]["usage"]):
            del usage["prompt_tokens_details"]
        assert said(events) == said(undisturbed)
        assert events[-1] == undisturbed[-1]
        assert events[-2] == undisturbed[-2]
        assert text.count("[DONE]") == 1
        assert text.count('"role"') == 1
        assert len({json.loads(e[6:])["id"] for e in text.split("\n\n") if e.startswith("data: {")}) == 1
        assert await rig.metric("migrations_total", outcome="moved") == 1
        await rig.settled()
        # The dead engine is passed over, and comes back when it is there again.
        assert (await rig.post({**ASK, "max_tokens": 1})).status_code == 200


async def test_a_stream_of_a_response_outlives_an_engine_that_is_killed(pair: list[Engine]) -> None:
    body = {"input": "Name three rivers.", "max_output_tokens": 40, "ignore_eos": True, "temperature": 0}
    body |= {"model": "m", "stream": True}

    def told(text: str) -> list[Any]:
        events = [json.loads(block.split("\ndata: ")[1]) for block in text.split("\n\n")[:-1]]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert len({event["response"]["id"] for event in events if "response" in event}) == 1
        last = events[-1]["response"]
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(deltas) == last["output"][0]["content"][0]["text"]
        return [[event["type"] for event in events], deltas, last["usage"]["output_tokens"], last["status"]]

    async with to(pair) as rig:
        undisturbed = told((await rig.post(body, "/v1/responses")).text)
        text = await kill_in_mid_stream(rig, pair, body, signal.SIGKILL, path="/v1/responses")
        assert told(text) == undisturbed
        assert await rig.metric("migrations_total", outcome="moved") == 1
        assert ": " not in {line[:2] for line in text.splitlines()}
        await rig.settled()


async def test_the_openai_client_gets_responses_through_the_gateway(
    pair: list[Engine], model_folder: Path
) -> None:
    asked: dict[str, Any] = {"model": "m", "input": "Name three rivers.", "temperature": 0}
    async with to(pair, **exact(model_folder)) as rig:
        await exact_tokens(rig)
        client = openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="any", max_retries=0, timeout=60)
        whole = await client.responses.create(**asked, max_output_tokens=8)
        async with client.responses.stream(**asked, max_output_tokens=8) as stream:
            text = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        assert "".join(text) == whole.output_text
        await until(lambda: rig.gateway.in_flight == 0)
        assert await rig.metric("completion_tokens_total") == 16
        for wrong, param in (
            ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
            ({"input": "a " * 3000}, "input"),
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(**{**asked, **wrong})
            assert refused.value.param == param
        await client.close()


def said(events: list[Any]) -> str:
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"])


@pytest.mark.parametrize("part", ["engine", "core", "server"])
async def test_a_stream_outlives_an_engine_that_is_frozen(pair: list[Engine], part: str) -> None:
    """SIGSTOP: connections stay open and nothing comes. It takes about three seconds to find out."""
    body = {**ASK, "max_tokens": 40, "ignore_eos": True, "stream": True}
    async with to(pair) as rig:
        asked = time.monotonic()
        undisturbed = without_identity((await rig.post(body)).text)
        began = time.monotonic()
        try:
            events = without_identity(await kill_in_mid_stream(rig, pair, body, signal.SIGSTOP, part))
            took = time.monotonic() - began
        finally:
            for engine in pair:
                engine.signal(signal.SIGCONT)
        print(f"{part} frozen: the whole stream took {took:.1f} s")
        assert said(events) == said(undisturbed)
        assert await rig.metric("migrations_total", outcome="moved") == 1
        # The silence was 31 s before cores had a pulse; what is left of it grows with the machine's load.
        assert took < 15 + 3 * (began - asked)
        await rig.settled()


@pytest.mark.parametrize("part", ["core", "server"])
async def test_a_request_to_a_frozen_engine_goes_to_another(pair: list[Engine], part: str) -> None:
    body = {**ASK, "max_tokens": 2}
    async with to(pair) as rig:
        rig.pods["pod-1"].ready = False
        assert (await rig.post(body)).headers["x-leadline-pod"] == "pod-0"
        try:
            pair[0].signal(signal.SIGSTOP, part)
            began = time.monotonic()
            asked = asyncio.ensure_future(rig.post(body))
            await until(lambda: rig.pods["pod-0"].in_flight == 1)
            rig.pods["pod-1"].ready = True
            assert (await asked).headers["x-leadline-pod"] == "pod-1"
            print(f"{part} frozen: the request took {time.monotonic() - began:.1f} s")
            # The next ones do not meet it at all, until it answers again.
            await until(lambda: not rig.pods["pod-0"].circuit.allows(time.monotonic()))
            for _ in range(3):
                assert (await rig.post(body)).headers["x-leadline-pod"] == "pod-1"
        finally:
            pair[0].signal(signal.SIGCONT)
        await until(lambda: rig.pods["pod-0"].circuit.allows(time.monotonic()))
        rig.pods["pod-1"].ready = False
        assert (await rig.post(body)).headers["x-leadline-pod"] == "pod-0"
        await rig.settled()


async def running_within(pair: list[Engine], wanted: bool, seconds: float) -> None:
    """Wait until some engine has, or no engine has, a request running."""
    async with asyncio.timeout(seconds), httpx.AsyncClient(timeout=30) as client:
        while True:
            texts = [(await client.get(engine.url + "/metrics")).text for engine in pair]
            lines = [line for text in texts for line in text.splitlines()]
            counts = [line for line in lines if line.startswith("leadline_engine_running_requests")]
            assert len(counts) == len(pair)
            if any(float(line.split()[-1]) for line in counts) == wanted:
                return


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves_frees_the_engine(pair: list[Engine], stream: bool) -> None:
    body = {**ASK, "max_tokens": 900, "ignore_eos": True, "stream": stream}
    async with to(pair) as rig:
        asking = asyncio.ensure_future(rig.post(body))
        await running_within(pair, True, 20)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await running_within(pair, False, 5)
        await rig.settled()


async def test_an_engine_that_was_restarted_serves_again(pair: list[Engine]) -> None:
    async with to(pair) as rig:
        for _ in range(4):
            assert (await rig.post({**ASK, "max_tokens": 1})).status_code == 200
        pair[0].kill()
        for _ in range(6):  # kept-alive connections are dead, new ones refused
            got = await rig.post({**ASK, "max_tokens": 1})
            assert got.status_code == 200
            assert got.headers["x-leadline-pod"] == "pod-1"
        pair[0].start()
        await asyncio.to_thread(pair[0].wait_ready)
        seen = set()
        loop = asyncio.get_running_loop()
        ends = loop.time() + 40
        number = 0
        while "pod-0" not in seen:
            assert loop.time() < ends
            number += 1
            body = {**ASK, "max_tokens": 1, "messages": [{"role": "user", "content": f"Number {number}"}]}
            seen.add((await rig.post(body)).headers["x-leadline-pod"])
        await rig.settled()
