"""Every whole request gets one whole answer, however it comes; and no client holds a pod by not reading."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Coroutine, Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from gateway_rig import (
    CHAT,
    STREAM,
    STREAM_HEAD,
    Received,
    Rig,
    ScriptedPod,
    busy,
    chunked,
    gateway_to,
    ok,
    pods,
    sse,
    until,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_client_connections import Wire, error_of, request, wire

from leadline.gateway.app import Gateway
from leadline.gateway.config.settings import GatewayConfig, PodConfig, ServiceConfig


def in_chunks(body: bytes) -> bytes:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + chunked(body[:9]) + chunked(body[9:]) + b"0\r\n\r\n"


# Bytes of a request, the status of its answer, and whether that answer has no body.
KNOWN = [
    (request(), 200, False),
    (request(json.dumps(STREAM).encode()), 200, False),
    (in_chunks(json.dumps(CHAT).encode()), 200, False),
    (request(b"{"), 400, False),
    (request(json.dumps({**CHAT, "model": "other"}).encode()), 404, False),
    (request(path="/nowhere"), 404, False),
    (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", 200, False),
    (b"GET /v1/models?a=b HTTP/1.1\r\nhost: x\r\n\r\n", 200, False),
    (b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n", 200, True),
    (b"HEAD /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n", 405, True),
    (b"GET /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n", 405, False),
    (b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", 200, False),
]
sequences = st.lists(st.sampled_from(KNOWN), min_size=1, max_size=6)
cuts = st.lists(st.integers(min_value=0, max_value=1500), max_size=6)


class Runs:
    """A gateway that serves all examples of a test."""

    def __init__(self, runner: asyncio.Runner, rig: Rig) -> None:
        self.run, self.rig = runner.run, rig

    def example(self, work: Coroutine[Any, Any, None]) -> None:
        self.run(work)
        self.run(self.rig.settled())


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()

        async def start() -> Rig:
            (pod,) = await stack.enter_async_context(pods(ok))
            return await stack.enter_async_context(gateway_to(pod.address))

        yield Runs(runner, runner.run(start()))
        runner.run(stack.aclose())


fuzzed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


async def send_in_pieces(client: Wire, data: bytes, where: list[int]) -> None:
    bounds = [0, *sorted({at % len(data) for at in where}), len(data)]
    for begin, end in pairwise(bounds):
        client.send(data[begin:end])
        await asyncio.sleep(0.001 if end % 3 else 0)


@fuzzed
@given(sequence=sequences, where=cuts, tail=st.sampled_from([b"", b"\x00\x01 nonsense\r\n\r\n", b"GET /hea"]))
def test_whole_requests_are_answered_in_order_however_they_are_cut(runs, sequence, where, tail) -> None:
    async def talk() -> None:
        async with wire(runs.rig) as client:
            await send_in_pieces(client, b"".join(data for data, _, _ in sequence) + tail, where)
            for _, status, bare in sequence:
                found, headers, body = await client.answer(bare=bare)
                assert found == status
                if found >= 400 and not bare:
                    error_of(body)
            if tail.startswith(b"\x00"):
                # Behind an answer that was still to come, that answer says "close", and no other follows.
                if headers.get("connection") != "close":
                    status, headers, body = await client.answer()
                    assert (status, headers["connection"]) == (400, "close")
                    assert error_of(body)["code"] == "invalid_http"
                assert await client.closed()
            elif not tail:  # the connection is as good as new
                client.send(request())
                assert (await client.answer())[0] == 200

    runs.example(talk())


@fuzzed
@given(sequence=sequences, where=cuts, keep=st.integers(min_value=0, max_value=1500))
def test_clients_that_leave_early_leave_nothing_behind(runs, sequence, where, keep) -> None:
    async def talk() -> None:
        async with wire(runs.rig) as client:
            data = b"".join(data for data, _, _ in sequence)
            await send_in_pieces(client, data[: 1 + keep % len(data)], where)
            if keep % 2:
                client.writer.transport.abort()

    runs.example(talk())


@fuzzed
@given(
    sequence=sequences,
    where=cuts,
    changes=st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_damaged_requests_are_answered_or_refused_and_harm_nobody(runs, sequence, where, changes) -> None:
    """What a damaged request means is the parser's business: but it ends, and the gateway goes on."""

    async def talk() -> None:
        data = bytearray(b"".join(data for data, _, _ in sequence))
        for at, value in changes:
            data[at % len(data)] = value
        async with wire(runs.rig) as client:
            with contextlib.suppress(OSError):  # closed by the gateway meanwhile
                await send_in_pieces(client, bytes(data), where)
                client.writer.write_eof()
                async with asyncio.timeout(10):
                    got = await client.reader.read()
                assert got == b"" or got.startswith(b"HTTP/1.1 ")
        assert (await runs.rig.post()).status_code == 200

    runs.example(talk())


async def flood(pod: ScriptedPod, received: Received, writer: asyncio.StreamWriter) -> None:
    """A stream without end, as fast as it is read."""
    if received.method == "GET":
        await ok(pod, received, writer)
        return
    writer.write(STREAM_HEAD)
    piece = chunked(sse({"choices": [{"index": 0, "delta": {"content": "x" * 16384}}]}))
    while True:
        writer.write(piece)
        await writer.drain()


async def test_a_client_that_does_not_read_is_cut_off_and_frees_its_pod() -> None:
    async with pods(flood) as (pod,), gateway_to(pod.address, write_timeout=0.3) as rig:
        async with wire(rig) as client:
            client.send(request(json.dumps(STREAM).encode()))
            client.writer.transport.pause_reading()
            await until(lambda: rig.gateway.in_flight)
            await rig.settled()
            await until(lambda: pod.dropped)
        assert await rig.metric("stalled_clients_total") == 1
        assert await rig.metric("requests_total", code="499") == 1


async def test_a_client_that_reads_slowly_keeps_its_stream() -> None:
    async with pods(flood) as (pod,), gateway_to(pod.address, write_timeout=1.0) as rig, wire(rig) as client:
        client.send(request(json.dumps(STREAM).encode()))
        ends = asyncio.get_running_loop().time() + 3.0
        while asyncio.get_running_loop().time() < ends:
            assert await client.reader.read(1 << 20)
            await asyncio.sleep(0.02)
        assert rig.gateway.in_flight == 1
        assert await rig.metric("stalled_clients_total") == 0


async def test_a_request_that_is_on_its_way_when_the_gateway_stops_is_answered() -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig, wire(rig) as fresh, wire(rig) as half:
        half.send(b"GET /heal")
        await until(lambda: len(rig.server.server_state.connections) == 2)
        rig.server.should_exit = True
        await until(lambda: not rig.server.servers or not rig.server.servers[0].is_serving())
        fresh.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        half.send(b"th HTTP/1.1\r\nhost: x\r\n\r\n")
        for client in (fresh, half):
            status, headers, _ = await client.answer()
            assert (status, headers["connection"]) == (200, "close")
            assert await client.closed()


async def test_a_request_that_outlasts_the_shutdown_is_told_so() -> None:
    async with pods(busy) as (pod,), gateway_to(pod.address) as rig, wire(rig) as client:
        rig.server.config.timeout_graceful_shutdown = 1
        client.send(request())
        await until(lambda: pod.completions)
        rig.server.should_exit = True
        status, headers, body = await client.answer()
        assert (status, error_of(body)["code"]) == (503, "draining")
        assert headers["connection"] == "close"


async def test_a_handler_that_ends_without_an_answer_is_answered_for(monkeypatch) -> None:
    async def nothing(exchange: object) -> None:
        return

    async def fault(exchange: object) -> None:
        raise ValueError("a mistake of ours")

    async with pods(ok) as (pod,), gateway_to(pod.address) as rig, wire(rig) as client:
        for handler in (nothing, fault):
            monkeypatch.setattr(rig.gateway, "respond", handler)
            client.send(request())
            status, _, body = await client.answer()
            assert (status, error_of(body)["type"]) == (500, "server_error")
        monkeypatch.undo()
        client.send(request())
        assert (await client.answer())[0] == 200


async def test_a_pods_answer_that_cannot_be_written_becomes_a_500(monkeypatch) -> None:
    monkeypatch.setattr(
        "leadline.gateway.proxy.relay.response_headers",
        lambda headers, keep_length: [(b"a", b"1\n\n2\n3\n4\n")],
    )
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig, wire(rig) as client:
        for body in (CHAT, STREAM):
            client.send(request(json.dumps(body).encode()))
            status, _, answer = await client.answer()
            assert (status, error_of(answer)["code"]) == (500, "internal_error")
        await rig.settled()


async def test_requests_before_the_start_are_told_to_come_again() -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig, wire(rig) as client:
        rig.gateway._proxy, proxy = None, rig.gateway._proxy
        client.send(request())
        status, headers, body = await client.answer()
        assert (status, headers["retry-after"], error_of(body)["code"]) == (503, "1", "starting")
        rig.gateway._proxy = proxy


async def test_under_a_plain_asgi_server_completions_say_what_is_wrong() -> None:
    service = ServiceConfig(
        name="default/m", tokenizer="approximate", pods=[PodConfig(address="127.0.0.1:1")]
    )
    gateway = Gateway(GatewayConfig(services=[service]).validate())
    transport = httpx.ASGITransport(gateway)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 501
        assert "leadline gateway" in answer.json()["error"]["message"]
        assert (await client.get("/health")).status_code == 200
