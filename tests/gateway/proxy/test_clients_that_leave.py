"""Row P9: a pod whose client has left learns it within a second. And P16 at random."""

from __future__ import annotations

import asyncio
import contextlib
import random

import httpx
import pytest
from gateway_rig import (
    CHAT,
    STREAM,
    STREAM_HEAD,
    Received,
    ScriptedPod,
    answer,
    busy,
    chunked,
    gateway_to,
    movable,
    ok,
    pods,
    sse,
    status,
    until,
)


async def endless(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
    """Streams until it is stopped."""
    writer.write(STREAM_HEAD)
    for number in range(100_000):
        writer.write(chunked(sse({"choices": [{"index": 0, "delta": {"content": f" {number}"}}]})))
        await writer.drain()
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
async def test_the_pod_is_told_when_the_client_leaves_before_the_first_byte(body: object) -> None:
    async with pods(busy) as (pod,), gateway_to(pod.address) as rig:
        asking = asyncio.ensure_future(rig.post(body))
        await until(lambda: len(pod.completions) == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert await until(lambda: pod.dropped == 1) < 1.0
        await rig.settled()
        assert await rig.metric("requests_total", code="499") == 1
        assert rig.pods["pod-0"].circuit.failures == 0  # type: ignore[attr-defined]


async def test_the_pod_is_told_when_the_client_leaves_in_mid_stream() -> None:
    async with pods(endless) as (pod,), gateway_to(pod.address) as rig, rig.client() as client:
        async with client.stream("POST", "/v1/chat/completions", json=STREAM) as got:
            await anext(got.aiter_bytes())
        assert await until(lambda: pod.dropped == 1) < 1.0
        await rig.settled()


async def test_the_pod_that_goes_on_with_a_stream_is_told_when_the_client_leaves() -> None:
    def says(text: str, token: int) -> bytes:
        choice = {"index": 0, "delta": {"content": text}, "token_ids": [token]}
        return chunked(sse({"id": "c", "created": 1, "choices": [choice]}))

    async def lost(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        resumed = bool(request.json.get("resume_token_ids"))
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}}
        writer.write(STREAM_HEAD + chunked(sse({"id": "c", "created": 1, "choices": [role]})))
        writer.write(says("second" if resumed else "first", 2 if resumed else 1))
        await writer.drain()
        if resumed:
            await asyncio.Event().wait()
        writer.transport.abort()

    async with (
        pods(movable(lost), movable(lost)) as both,
        gateway_to(*[pod.address for pod in both], migration="auto") as rig,
        rig.client() as client,
    ):
        async with client.stream("POST", "/v1/chat/completions", json=STREAM) as got:
            async for line in got.aiter_lines():
                if "second" in line:
                    break
        assert await until(lambda: sum(pod.dropped for pod in both) == 1) < 1.0
        await rig.settled()


@pytest.mark.parametrize("choices", [1, 2], ids=["a stream that could move", "one that could not"])
async def test_a_client_that_closes_behind_done_has_its_answer(choices: int) -> None:
    """As many clients do, without waiting for the end of the chunks: no request that failed."""
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}

    async def says_done(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        if request.method == "GET":
            writer.write(answer(b"{}"))
            return
        said = {"choices": [{"index": 0, "delta": {"content": "Hi."}, "finish_reason": "stop"}]}
        writer.write(STREAM_HEAD)
        writer.write(chunked(sse(said)) + chunked(sse({"choices": [], "usage": usage})))
        writer.write(chunked(b"data: [DONE]\n\n"))
        await writer.drain()
        await asyncio.Event().wait()

    async with pods(says_done) as (pod,), gateway_to(pod.address) as rig, rig.client() as client:
        async with client.stream("POST", "/v1/chat/completions", json={**STREAM, "n": choices}) as got:
            async for line in got.aiter_lines():
                if line == "data: [DONE]":
                    break
        await until(lambda: pod.dropped == 1)
        await rig.settled()
        assert await rig.metric("requests_total", code="200") == 1
        assert await rig.metric("requests_total", code="499") == 0
        assert await rig.metric("prompt_tokens_total") == 7, "its usage is known"


async def test_the_pod_is_told_when_the_client_stops_reading_and_leaves() -> None:
    """The gateway is stuck in writing then, not in reading."""

    async def flood(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        while True:
            writer.write(chunked(sse("x" * 60_000)))
            await writer.drain()

    async with pods(flood) as (pod,), gateway_to(pod.address) as rig:
        host, port = rig.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}]}'
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
        await until(lambda: rig.pods["pod-0"].in_flight == 1)
        await until(lambda: any(w.transport.get_write_buffer_size() > 60_000 for w in pod._writers))
        writer.transport.abort()
        assert await until(lambda: pod.dropped == 1) < 1.0
        await rig.settled()


async def test_a_client_that_leaves_while_it_waits_for_room_leaves_the_queue() -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig:
        rig.pods["pod-0"].ready = False
        service = rig.gateway.table.get("default/m")
        assert service is not None
        asking = asyncio.ensure_future(rig.post())
        await until(lambda: rig.gateway.admission.waiting(service) == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert await until(lambda: rig.gateway.admission.waiting(service) == 0) < 1.0
        await rig.settled()
        assert pod.received == []


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_forgotten() -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig:
        host, port = rig.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await until(lambda: rig.gateway.in_flight == 1)
        writer.transport.abort()
        await rig.settled()
        assert pod.received == []


@pytest.mark.parametrize("seed", range(3))
async def test_all_counts_return_to_zero_whatever_happens(seed: int) -> None:
    """Row P16: faults of all kinds and clients that leave at any moment, at random."""
    rng = random.Random(seed)

    async def moody(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(rng.random() * 0.02)
        match rng.randrange(8):
            case 0:
                writer.transport.abort()
            case 1:
                await status(503, "Retry-After: 1")(pod, request, writer)
            case 2:
                await status(500)(pod, request, writer)
            case 3:
                writer.write(STREAM_HEAD + chunked(sse("half")))
                await writer.drain()
                await asyncio.sleep(rng.random() * 0.02)
                writer.transport.abort()
            case 4:
                await endless(pod, request, writer)
            case 5:
                writer.write(answer(b"{}")[:-1])
                await writer.drain()
                writer.close()
            case _:
                await ok(pod, request, writer)

    async def ask(rig: object) -> None:
        body = rng.choice([CHAT, STREAM, {"model": "m"}, {**CHAT, "model": "no"}, {**CHAT, "deadline": 0.02}])
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(rng.random() * 0.3):
                await rig.post(body)  # type: ignore[attr-defined]

    async with (
        pods(moody, moody, moody) as servers,
        gateway_to(*[pod.address for pod in servers], breaker_seconds=0.02, breaker_failures=2) as rig,
    ):
        for _ in range(5):
            await asyncio.gather(*[ask(rig) for _ in range(12)])
        await rig.settled()
        for pod in rig.pods.values():
            assert not getattr(pod.circuit, "probing", False)  # a pod that was never asked has no breaker
        assert await rig.metric("in_flight_requests") == 0
