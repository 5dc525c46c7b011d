"""Pods that fail, refuse, hang or leave: rows P8, P12, P13, P14, P16, P20."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import httpx
import openai
import pytest
from gateway_rig import (
    CHAT,
    STREAM,
    STREAM_HEAD,
    Received,
    Script,
    ScriptedPod,
    answer,
    busy,
    chunked,
    gateway_to,
    hang,
    ok,
    pods,
    sse,
    status,
    until,
)

from leadline.gateway.upstream.breaker import CircuitBreaker


async def _closed_port() -> str:
    pod = await ScriptedPod(ok).start()
    await pod.stop()
    return pod.address


async def reset(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def garbage(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")


async def half(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
    """Promises more than it sends."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{")
    await writer.drain()
    writer.transport.abort()


async def switch(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
    """Answers a request that no client sent."""
    writer.write(b"HTTP/1.1 101 X\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n\x81\x05hello")


FAULTS: list[tuple[Script, str]] = [
    (reset, "lost"),
    (garbage, "lost"),
    (half, "lost"),
    (switch, "lost"),
    (status(999), "lost"),
    (status(429, "Retry-After: 7"), "status_429"),
    (status(503, "Retry-After: 7"), "status_503"),
    (status(502), "status_502"),
    (status(504), "status_504"),
]


@pytest.mark.parametrize(
    ("fault", "reason"), FAULTS, ids=lambda value: getattr(value, "__name__", str(value))
)
@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
async def test_another_pod_is_tried_before_the_first_byte(
    fault: Script, reason: str, body: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        pods(fault, ok) as (bad, good),
        gateway_to(bad.address, good.address, service={"policy": "least-load"}) as rig,
    ):
        asked = 0
        while not bad.completions or asked < 3:  # two idle pods are picked at random
            got = await rig.post(body)
            assert got.status_code == 200
            assert got.headers["x-leadline-pod"] == "pod-1"
            asked += 1
        assert len(good.completions) == asked
        assert await rig.metric("retries_total", reason=reason) >= 1
        await rig.settled()
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_pod_that_cannot_be_reached_is_passed_over() -> None:
    async with (
        pods(ok) as (good,),
        gateway_to(await _closed_port(), good.address, breaker_seconds=60.0) as rig,
    ):
        for _ in range(10):
            assert (await rig.post()).status_code == 200
        breaker = rig.pods["pod-0"].circuit
        assert isinstance(breaker, CircuitBreaker)
        assert breaker.failures <= 3  # open after three
        await rig.settled()


@pytest.mark.parametrize("code", [429, 503])
async def test_when_all_pods_refuse_the_refusal_and_its_retry_after_are_passed_on(code: int) -> None:
    script = status(code, "Retry-After: 7")
    async with pods(script, script) as (one, two), gateway_to(one.address, two.address) as rig:
        got = await rig.post()
        assert got.status_code == code
        assert got.headers["retry-after"] == "7"
        assert got.json()["error"]["message"] == f"no {code}"
        assert len(one.completions) == len(two.completions) == 1
        await rig.settled()


async def test_when_no_pod_can_be_reached_the_answer_says_so() -> None:
    async with gateway_to(await _closed_port(), await _closed_port()) as rig:
        got = await rig.post()
        assert got.status_code == 502
        assert got.json()["error"]["code"] == "upstream_unreachable"
        await rig.settled()


@pytest.mark.parametrize("code", [400, 401, 404, 413, 422])
async def test_client_errors_are_passed_on_and_open_no_circuit(code: int) -> None:
    async with pods(status(code), ok) as (bad, good), gateway_to(bad.address, good.address) as rig:
        rig.pods["pod-1"].ready = False
        for _ in range(8):
            assert (await rig.post()).status_code == code
        assert len(bad.completions) == 8
        assert rig.pods["pod-0"].circuit.allows(time.monotonic())
        assert good.completions == []


async def test_full_pods_open_no_circuit() -> None:
    async with pods(status(503, "Retry-After: 1")) as (pod,), gateway_to(pod.address) as rig:
        for _ in range(8):
            assert (await rig.post()).status_code == 503
        assert len(pod.completions) == 8


async def test_requests_that_fail_on_every_pod_open_no_circuit() -> None:
    """A grammar that fails in the middle of an answer is the request's own fault."""
    async with pods(status(500, "X-Should-Retry: false")) as (pod,), gateway_to(pod.address) as rig:
        for _ in range(8):
            response = await rig.post()
            assert (response.status_code, response.headers["x-should-retry"]) == (500, "false")
        assert len(pod.completions) == 8


async def test_a_circuit_opens_on_server_errors_and_closes_when_the_pod_is_well_again() -> None:
    sick = True

    async def script(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        if sick and request.method == "POST":
            writer.write(answer(b"{}", status=500))
        else:
            await ok(pod, request, writer)

    async with (
        pods(script) as (pod,),
        gateway_to(pod.address, config={"admission": _no_wait()}, breaker_seconds=2.0) as rig,
    ):
        for _ in range(3):
            assert (await rig.post()).status_code == 500
        refused = await rig.post()
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert len(pod.completions) == 3
        assert await rig.metric("circuit_state", pod="pod-0") == 2
        sick = False
        breaker = rig.pods["pod-0"].circuit
        await until(lambda: breaker.allows(time.monotonic()))
        assert (await rig.post()).status_code == 200
        assert await rig.metric("circuit_state", pod="pod-0") == 0
        await rig.settled()


def _no_wait() -> object:
    from leadline.gateway.config.settings import AdmissionConfig

    return AdmissionConfig(hold_without_pods_seconds=0.0)


def test_a_half_open_circuit_lets_one_request_try() -> None:
    breaker = CircuitBreaker(failures=2, seconds=1.0, max_seconds=3.0)
    breaker.begin()
    assert not breaker.failed(0.0)
    assert breaker.failed(0.0)
    assert not breaker.allows(0.9)
    assert breaker.allows(1.0)
    breaker.begin()
    assert not breaker.allows(1.0)
    assert breaker.failed(1.0)  # twice as long now
    assert not breaker.allows(2.9)
    assert breaker.allows(3.0)
    breaker.begin()
    breaker.abandoned()  # the client left: another request may try
    assert breaker.allows(3.0)
    breaker.begin()
    breaker.succeeded()
    assert breaker.allows(3.0)
    assert breaker.failures == 0


async def test_an_error_of_the_engine_is_not_tried_again() -> None:
    """It may be this request's doing: no pod shall be its next victim."""
    async with pods(status(500), status(500)) as (one, two), gateway_to(one.address, two.address) as rig:
        assert (await rig.post()).status_code == 500
        assert len(one.completions) + len(two.completions) == 1


async def test_nothing_is_tried_again_once_a_byte_went_out() -> None:
    async def breaks(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(sse({"choices": [{"index": 0, "delta": {"content": "One"}}]})))
        await writer.drain()
        writer.transport.abort()

    async with pods(breaks, breaks) as (one, two), gateway_to(one.address, two.address) as rig:
        got = await rig.post(STREAM)
        assert got.status_code == 200
        assert len(one.completions) + len(two.completions) == 1
        events = got.text.strip().split("\n\n")
        assert len(events) == 2
        assert '"code":"upstream_lost"' in events[1]
        assert "[DONE]" not in got.text
        await rig.settled()


async def test_a_long_answer_whose_pod_is_lost_is_broken_off(caplog: pytest.LogCaptureFixture) -> None:
    async def huge(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        if request.method == "GET":
            return await ok(pod, request, writer)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99000000\r\n\r\n" + bytes(17 << 20))
        await writer.drain()
        writer.transport.abort()

    async with pods(huge) as (pod,), gateway_to(pod.address) as rig:
        with pytest.raises(httpx.RemoteProtocolError):
            await rig.post()
        await rig.settled()
        assert await rig.metric("requests_total", code="502") == 1
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_stream_that_ends_within_an_event_tells_the_openai_client_so() -> None:
    """It reads events as JSON: half of one in front of the error would be all it complained of."""
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    whole = sse({**chunk, "choices": [{"index": 0, "delta": {"content": "One"}}]})

    async def breaks(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(whole) + chunked(whole[: len(whole) // 2]))
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()

    async with (
        pods(breaks) as (pod,),
        gateway_to(pod.address) as rig,
        openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="any", max_retries=0) as client,
    ):
        parts = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hello"}], stream=True
        )
        assert (await anext(parts)).choices[0].delta.content == "One"
        with pytest.raises(openai.APIError, match="lost in mid-stream"):
            await anext(parts)
        await rig.settled()


async def test_a_pod_that_is_lost_behind_the_end_of_its_stream_is_no_error() -> None:
    async def ends(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(sse({"choices": []})) + chunked(sse("[DONE]")))
        await writer.drain()
        writer.close()

    async with pods(ends) as (pod,), gateway_to(pod.address) as rig:
        assert (await rig.post(STREAM)).content == sse({"choices": []}) + sse("[DONE]")
        await rig.settled()
        assert await rig.metric("requests_total", code="200") == 1


async def test_a_pod_that_hangs_is_left_for_another() -> None:
    async with (
        pods(hang, ok) as (bad, good),
        gateway_to(bad.address, good.address, probe_after=0.2, leave_after=0.2, hangs_after=0.2) as rig,
    ):
        rig.pods["pod-1"].ready = False
        waiting = asyncio.ensure_future(rig.post())
        await until(lambda: len(bad.completions) == 1)
        rig.pods["pod-1"].ready = True
        got = await waiting
        assert got.status_code == 200
        assert got.headers["x-leadline-pod"] == "pod-1"
        assert await rig.metric("retries_total", reason="timeout") == 1
        await rig.settled()


async def test_a_pod_that_hangs_is_sent_nothing_until_it_answers_again() -> None:
    stopped = asyncio.Event()

    async def script(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        await (ok if stopped.is_set() else hang)(pod, request, writer)

    async with (
        pods(script, ok) as (bad, good),
        gateway_to(
            bad.address,
            good.address,
            probe_after=0.1,
            leave_after=0.1,
            probe_timeout=0.3,
            breaker_seconds=0.1,
        ) as rig,
    ):
        rig.pods["pod-1"].ready = False
        waiting = asyncio.ensure_future(rig.post())
        await until(lambda: bad.completions)
        rig.pods["pod-1"].ready = True
        assert (await waiting).status_code == 200
        # One request has found out; no other one has to, however long it lasts.
        await until(lambda: not rig.pods["pod-0"].circuit.allows(time.monotonic()))
        await until(lambda: len(bad.received) >= 4)
        for _ in range(5):
            assert (await rig.post()).headers["x-leadline-pod"] == "pod-1"
        assert len(bad.completions) == 1
        assert await rig.metric("circuit_state", pod="pod-0") == 2
        stopped.set()
        breaker = rig.pods["pod-0"].circuit
        await until(lambda: breaker.allows(time.monotonic()))
        rig.pods["pod-1"].ready = False
        assert (await rig.post()).headers["x-leadline-pod"] == "pod-0"
        assert await rig.metric("circuit_state", pod="pod-0") == 0
        await rig.settled()


async def test_a_pod_that_says_it_cannot_serve_is_left_at_once() -> None:
    """An engine whose core is frozen answers /health with 503: no further time is lost, and streams move."""

    async def frozen(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        if request.method == "GET":
            writer.write(answer(b"{}", status=503))
        else:
            await asyncio.Event().wait()

    patient = {"leave_after": 30.0, "hangs_after": 30.0, "probe_timeout": 30.0}
    async with (
        pods(frozen, ok) as (bad, good),
        gateway_to(bad.address, good.address, probe_after=0.2, **patient) as rig,
    ):
        rig.pods["pod-1"].ready = False
        waiting = asyncio.ensure_future(rig.post())
        await until(lambda: len(bad.completions) == 1)
        rig.pods["pod-1"].ready = True
        assert (await waiting).headers["x-leadline-pod"] == "pod-1"
        assert await rig.metric("circuit_state", pod="pod-0") == 2
        await rig.settled()


async def test_an_overloaded_pod_is_waited_for_where_no_other_can_serve() -> None:
    """It answers /health later than requests with another pod to go to would wait."""
    asked = asyncio.Event()

    async def overloaded(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        if request.method == "GET":
            asked.set()
            await asyncio.sleep(0.5)
        else:
            await asked.wait()
            await asyncio.sleep(0.8)
        await ok(pod, request, writer)

    hasty = {"probe_after": 0.1, "leave_after": 0.1, "hangs_after": 0.2, "probe_timeout": 30.0}
    async with pods(overloaded) as (pod,), gateway_to(pod.address, **hasty) as rig:
        assert (await rig.post()).status_code == 200
        assert len(pod.completions) == 1
        assert await rig.metric("circuit_state", pod="pod-0") == 0
    full = {"pod_concurrency": 1}
    asked.clear()
    async with (
        pods(overloaded, busy) as (one, two),
        gateway_to(one.address, two.address, service=full, **hasty) as rig,
    ):
        rig.pods["pod-0"].ready = False
        holder = asyncio.ensure_future(rig.post())
        await until(lambda: two.completions)
        rig.pods["pod-0"].ready = True
        assert (await rig.post()).headers["x-leadline-pod"] == "pod-0"
        holder.cancel()
        await asyncio.gather(holder, return_exceptions=True)
        await rig.settled()


async def test_a_pod_that_is_slow_but_well_is_waited_for() -> None:
    async def slow(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        if request.method == "POST":
            await until(lambda: sum(one.method == "GET" for one in pod.received) >= 3)
        await ok(pod, request, writer)

    async with (
        pods(slow, ok) as (one, two),
        gateway_to(one.address, two.address, probe_after=0.1, probe_timeout=5.0) as rig,
    ):
        rig.pods["pod-1"].ready = False
        assert (await rig.post()).status_code == 200
        assert two.completions == []


@pytest.mark.parametrize(
    ("body", "limit"), [(STREAM, {"first_byte_timeout": 0.2}), (CHAT, {"answer_timeout": 0.2})]
)
async def test_an_answer_is_waited_for_no_longer_than_the_limit(
    body: object, limit: dict[str, float]
) -> None:
    async with pods(busy) as (pod,), gateway_to(pod.address, **limit) as rig:
        got = await rig.post(body)
        assert got.status_code == 504
        assert got.json()["error"]["code"] == "upstream_timeout"
        await until(lambda: pod.dropped == 1)
        await rig.settled()


async def test_a_long_answer_that_is_no_stream_is_waited_for_and_not_begun_again() -> None:
    """Its first byte comes with its last: the time to the first byte of streams says nothing of it."""

    async def slow(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        if request.method == "POST":
            await asyncio.sleep(0.6)
        await ok(pod, request, writer)

    settings: dict[str, Any] = {"first_byte_timeout": 0.2, "breaker_failures": 1}
    async with pods(slow, slow) as (one, two), gateway_to(one.address, two.address, **settings) as rig:
        assert (await rig.post()).status_code == 200
        assert len(one.completions) + len(two.completions) == 1
        assert await rig.metric("circuit_state") == 0
        await rig.settled()


async def test_a_deadline_of_the_request_bounds_all_attempts() -> None:
    async with pods(busy, busy) as (one, two), gateway_to(one.address, two.address) as rig:
        began = time.monotonic()
        got = await rig.post({**CHAT, "deadline": 0.3})
        assert got.status_code == 504
        assert got.json()["error"]["code"] == "deadline_exceeded"
        assert time.monotonic() - began < 2
        await rig.settled()


async def test_a_terminating_pod_gets_nothing_new_and_finishes_its_streams() -> None:
    """Row P8."""
    more = asyncio.Event()

    async def script(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(sse("one")))
        await more.wait()
        writer.write(chunked(sse("[DONE]")) + b"0\r\n\r\n")

    async with pods(script, ok) as (old, new), gateway_to(old.address, new.address) as rig, rig.client() as c:
        rig.pods["pod-1"].ready = False
        async with c.stream("POST", "/v1/chat/completions", json=STREAM) as stream:
            assert stream.headers["x-leadline-pod"] == "pod-0"
            rig.pods["pod-1"].ready = True
            rig.pods["pod-0"].terminating = True
            for _ in range(6):
                assert (await rig.post()).headers["x-leadline-pod"] == "pod-1"
            more.set()
            assert (await stream.aread()).endswith(b"data: [DONE]\n\n")
        assert len(old.completions) == 1
        await rig.settled()


async def test_identical_prompts_at_once_spread_over_the_pods() -> None:
    """Row P20."""

    async def slow(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)  # not a wait for anything: it is how long this pod takes
        await ok(pod, request, writer)

    long = {**CHAT, "messages": [{"role": "user", "content": "again " * 500}]}
    async with (
        pods(slow, slow, slow) as servers,
        gateway_to(*[pod.address for pod in servers]) as rig,
    ):
        got = await asyncio.gather(*[rig.post(long) for _ in range(30)])
        share = Counter(one.headers["x-leadline-pod"] for one in got)
        assert len(share) == 3
        assert min(share.values()) >= 4
        await rig.settled()


async def test_a_service_without_pods_holds_requests_until_one_comes() -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig:
        rig.pods["pod-0"].ready = False
        waiting = asyncio.ensure_future(rig.post())
        service = rig.gateway.table.get("default/m")
        assert service is not None
        await until(lambda: rig.gateway.admission.waiting(service) == 1)
        rig.pods["pod-0"].ready = True
        assert (await waiting).status_code == 200
        await rig.settled()
