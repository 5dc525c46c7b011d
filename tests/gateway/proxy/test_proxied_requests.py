"""What goes through unchanged, what is stripped, what is refused: rows P10, P11, P18, P25."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import openai
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
    completion,
    gateway_to,
    ok,
    pods,
    sse,
    until,
)

from leadline.gateway.access.keys import key_entry
from leadline.gateway.config.settings import UpstreamConfig
from leadline.gateway.proxy.forwarding import CREDENTIALS


async def test_a_body_reaches_the_pod_unchanged() -> None:
    body = b'{ "messages":[{"role":"user","content":"h\xc3\xa9llo"}],\n "model" : "m", "x_unknown": 1.50 }'
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig:
        got = await rig.post(body, headers={"Content-Type": "application/json"})
        assert got.status_code == 200
        assert got.content == completion()
        assert pod.completions[0].body == body
        assert got.headers["x-leadline-pod"] == "pod-0"
        await rig.settled()


async def test_hop_by_hop_headers_are_stripped_both_ways() -> None:
    async def script(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        headers = (
            "Content-Type: application/json\r\nServer: engine\r\nDate: now\r\nConnection: x-secret-hop\r\n"
            "X-Secret-Hop: 1\r\nKeep-Alive: timeout=5\r\nX-Engine: 7"
        )
        writer.write(answer(completion(), headers=headers))

    sent = {
        "Connection": "x-private",
        "X-Private": "1",
        "TE": "trailers",
        "Keep-Alive": "timeout=1",
        "Proxy-Authorization": "Basic x",
        "X-Kept": "yes",
        "X-Forwarded-For": "10.1.1.1",
    }
    async with pods(script) as (pod,), gateway_to(pod.address) as rig:
        got = await rig.post(headers=sent)
        seen = pod.completions[0]
        for name in ("x-private", "te", "keep-alive", "proxy-authorization", "transfer-encoding"):
            assert seen.one(name) is None, name
        assert seen.one("x-kept") == "yes"
        assert seen.one("x-forwarded-for") == "10.1.1.1, 127.0.0.1"
        assert seen.one("host") == pod.address
        assert seen.one("content-length") == str(len(seen.body))
        for name in ("x-secret-hop", "keep-alive"):
            assert name not in got.headers
        assert got.headers["x-engine"] == "7"
        for name in ("server", "date", "content-length", "content-type"):
            assert len(got.headers.get_list(name)) == 1, name
        assert got.headers["server"] == "engine"


async def test_every_proxy_on_the_way_is_named_to_the_pod() -> None:
    """HAProxy adds a line of its own behind the client's."""
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig:
        await rig.post(headers=[("X-Forwarded-For", "203.0.113.9"), ("X-Forwarded-For", "10.1.1.1")])
        assert pod.completions[0].one("x-forwarded-for") == "203.0.113.9, 10.1.1.1, 127.0.0.1"


async def test_trailers_do_not_become_headers() -> None:
    """RFC 9110 section 6.5.1: a proxy in front of us that checks or strips headers has not seen them."""
    body = json.dumps(CHAT).encode()
    secret = b"X-User: root\r\nAuthorization: Bearer other\r\nX-Leadline-Pod: mine\r\n"

    async def script(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + chunked(completion()) + b"0\r\nX-Late: 1\r\nSet-Cookie: a=b\r\n\r\n")

    async with pods(script) as (pod,), gateway_to(pod.address) as rig:
        reader, writer = await asyncio.open_connection(*rig.url.removeprefix("http://").split(":"))
        for authorization in (b"", b"Authorization: Bearer own\r\n"):
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
            writer.write(head + authorization + b"\r\n" + chunked(body) + b"0\r\n" + secret + b"\r\n")
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert answer.startswith(b"http/1.1 200")
            assert b"x-late" not in answer
            assert b"set-cookie" not in answer
            await reader.readexactly(len(completion()))
            assert pod.completions[-1].body == body
            assert pod.completions[-1].one("x-user") is None
            assert pod.completions[-1].one("authorization") is None
        writer.close()
        await rig.settled()


@pytest.mark.parametrize(
    ("config", "service", "sent"),
    [
        ({}, {}, None),
        ({"upstream": UpstreamConfig(api_key="pods")}, {}, "Bearer pods"),
        ({"upstream": UpstreamConfig(api_key="pods")}, {"api_key": "own"}, "Bearer own"),
    ],
)
async def test_no_pod_is_shown_what_its_clients_prove_themselves_with(
    config: dict[str, Any], service: dict[str, Any], sent: str | None
) -> None:
    secrets = {name.decode(): "secret" for name in CREDENTIALS} | {"authorization": "Bearer secret"}
    harmless = {"Content-Type": "application/vnd.odd+json", "X-User": "me"}
    async with pods(ok) as (pod,), gateway_to(pod.address, config=config, service=service) as rig:
        await rig.post(json.dumps(CHAT).encode(), headers={**secrets, **harmless})
        (request,) = pod.completions
        assert request.one("authorization") == sent
        assert not any("secret" in value for _, value in request.headers)
        assert (request.one("content-type"), request.one("x-user")) == tuple(harmless.values())


async def test_a_compressed_answer_passes_as_it_is() -> None:
    import gzip

    packed = gzip.compress(completion())

    async def script(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        assert "gzip" in (request.one("accept-encoding") or "")
        writer.write(answer(packed, headers="Content-Type: application/json\r\nContent-Encoding: gzip"))

    async with pods(script) as (pod,), gateway_to(pod.address) as rig:
        got = await rig.post()
        assert got.content == completion()


async def test_each_piece_of_a_stream_goes_out_at_once() -> None:
    more = asyncio.Event()

    async def script(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(sse("one")))
        await more.wait()
        writer.write(chunked(b"data: tw"))
        await asyncio.sleep(0)
        writer.write(chunked(b"o\n\n") + b"0\r\n\r\n")

    async with pods(script) as (pod,), gateway_to(pod.address) as rig, rig.client() as client:
        async with client.stream("POST", "/v1/chat/completions", json=STREAM) as got:
            assert got.headers["x-accel-buffering"] == "no"
            assert got.headers["cache-control"] == "no-cache"
            assert "content-length" not in got.headers
            pieces = got.aiter_bytes()
            assert await anext(pieces) == sse("one")  # while the pod waits for us
            more.set()
            rest = b"".join([piece async for piece in pieces])
        assert rest == sse("two")
        await rig.settled()


async def test_an_answer_without_length_ends_with_its_connection() -> None:
    async def script(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n" + completion())
        await writer.drain()
        writer.close()

    async with pods(script) as (pod,), gateway_to(pod.address) as rig:
        assert (await rig.post()).content == completion()


async def test_interim_answers_are_not_the_answer() -> None:
    async def script(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + answer(completion()))

    async with pods(script) as (pod,), gateway_to(pod.address) as rig:
        got = await rig.post()
        assert got.status_code == 200
        assert "link" not in got.headers


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
async def test_a_second_answer_is_no_part_of_the_first(body: object) -> None:
    content = sse("[DONE]") if body is STREAM else completion()
    first = STREAM_HEAD + chunked(content) + b"0\r\n\r\n" if body is STREAM else answer(content)

    async def twice(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(first + answer(b"another's", status=500))

    async with pods(twice) as (pod,), gateway_to(pod.address) as rig:
        for number in (1, 2):
            got = await rig.post(body)
            assert (got.status_code, got.content) == (200, content)
            assert pod.connections == number  # on which other bytes may be on their way


async def test_connections_to_pods_are_used_again() -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig:
        for _ in range(5):
            assert (await rig.post()).status_code == 200
            assert (await rig.post(STREAM)).status_code == 200
        assert pod.connections == 1


async def test_a_connection_that_the_pod_closed_meanwhile_is_replaced() -> None:
    async def one_each(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        await ok(pod, request, writer)
        if len(pod.received) == 1:
            return
        await writer.drain()

    async with pods(one_each) as (pod,), gateway_to(pod.address) as rig:
        assert (await rig.post()).status_code == 200
        for writer in list(pod._writers):
            writer.close()
        assert (await rig.post()).status_code == 200
        assert await rig.metric("retries_total") == 0


BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b'{"model": 5, "messages": [{"role": "user", "content": "x"}]}',
    b'{"model": "m", "messages": "x", "stream": "yes"}',
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "n": []}',
    b"\xff\xfe",
    b'{"model":"m","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
]


@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: body[:24].decode("latin-1"))
async def test_a_malformed_body_is_the_clients_mistake(body: bytes) -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig:
        got = await rig.post(body, headers={"Content-Type": "application/json"})
        assert got.status_code == 400, got.text
        error = got.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert pod.received == []
        assert await rig.metric("requests_total", code="400") == 1
        await rig.settled()


async def test_what_only_other_engines_understand_is_theirs_to_judge() -> None:
    """Without a tokenizer of its own the gateway need not read all of a prompt."""
    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig:
        assert (await rig.post(body)).status_code == 200
        assert pod.completions[0].json == body


async def test_a_body_above_the_limit_is_refused_with_413() -> None:
    body = json.dumps({**CHAT, "user": "x" * 5000}).encode()

    async def pieces():
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    async with pods(ok) as (pod,), gateway_to(pod.address, max_body_bytes=4000) as rig:
        declared = await rig.post(body)
        async with rig.client() as client:
            streamed = await client.post("/v1/chat/completions", content=pieces())
        for got in (declared, streamed):
            assert got.status_code == 413
            assert got.json()["error"]["code"] == "body_too_large"
        assert pod.received == []
        await rig.settled()


async def test_a_compressed_body_is_refused_with_a_word() -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig:
        got = await rig.post(b"x", headers={"Content-Encoding": "gzip"})
        assert got.status_code == 415
        assert "compressed" in got.json()["error"]["message"]


async def test_the_rest_of_the_api_answers() -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig, rig.client() as client:
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["m"]
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        assert (await client.get("/version")).json()["version"]
        missing = await client.get("/nowhere")
        assert missing.status_code == 404
        assert missing.json()["error"]["type"] == "not_found_error"
        wrong = await client.get("/v1/chat/completions")
        assert wrong.status_code == 405
        assert wrong.headers["allow"] == "POST"
        assert wrong.json()["error"]["message"] == "GET is not a method of this path: /v1/chat/completions"
        unknown = await rig.post({**CHAT, "model": "nobody"})
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "model_not_found"
        rig.pods["pod-0"].ready = False
        assert (await client.get("/ready")).status_code == 503
        (service,) = rig.gateway.table
        service.wake_seconds = 60.0  # a request starts a pod
        assert (await client.get("/ready")).status_code == 200
        service.stuck = True
        assert (await client.get("/ready")).status_code == 503


async def test_a_model_can_be_asked_for_by_any_name(tmp_path: Path) -> None:
    names = ["m", "Qwen/Qwen3-8B", "模型 1"]
    _, entry = key_entry("alice", "sk-alice", models=names[1:])
    (tmp_path / "keys.yaml").write_text("keys:\n" + entry)
    options: dict[str, Any] = {"config": {"keys_file": str(tmp_path / "keys.yaml")}}
    async with (
        pods(ok) as (pod,),
        gateway_to(pod.address, service={"served_names": names}, **options) as rig,
        openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="sk-alice", max_retries=0) as client,
    ):
        for name in names[1:]:
            assert (await client.models.retrieve(name)).id == name
        for name in ("m", "Qwen", "Qwen/Qwen3-8B/"):  # not for this key, or for no key
            with pytest.raises(openai.NotFoundError) as caught:
                await client.models.retrieve(name)
            assert caught.value.code == "model_not_found"
        stranger = client.with_options(api_key="sk-other")
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.retrieve(names[1])


async def test_the_answer_explains_the_choice_when_asked() -> None:
    async with pods(ok, ok) as (one, two), gateway_to(one.address, two.address) as rig:
        long = {**CHAT, "messages": [{"role": "user", "content": "word " * 600}]}
        first = await rig.post(long)
        again = await rig.post(long, headers={"X-Leadline-Explain": "1"})
        assert "x-leadline-explain" not in first.headers
        why = json.loads(again.headers["x-leadline-explain"])
        assert why["pod"] == first.headers["x-leadline-pod"] == again.headers["x-leadline-pod"]
        assert why["policy"] == "prefix"
        rows = {row["pod"]: row for row in why["pods"]}
        assert set(rows) == {"pod-0", "pod-1"}
        other = ({"pod-0", "pod-1"} - {why["pod"]}).pop()
        assert rows[why["pod"]]["matched_tokens"] > 500
        assert rows[other]["matched_tokens"] == 0
        assert rows[why["pod"]]["seconds"] < rows[other]["seconds"]


async def test_predicted_and_actual_cached_tokens_are_counted_where_the_chain_is_exact() -> None:
    """Row P21. The pod says how much it had; approximate chains predict nothing."""

    async def script(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(completion(prompt_tokens=900, cached=640)))

    async with pods(script) as (pod,), gateway_to(pod.address) as rig:
        await rig.post()
        await until(lambda: rig.gateway.in_flight == 0)
        assert await rig.metric("actual_cached_tokens_total") == 640
        assert await rig.metric("predicted_cached_tokens_total") == 0
        assert await rig.metric("prompt_tokens_total") == 900


async def test_a_usage_that_cannot_be_is_not_counted() -> None:
    """Counters take no negative amounts: metrics stood still from then on."""

    async def script(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(completion(prompt_tokens=-900)))

    async with pods(script) as (pod,), gateway_to(pod.address) as rig:
        assert (await rig.post()).content == completion(prompt_tokens=-900)
        await until(lambda: rig.gateway.in_flight == 0)
        assert await rig.metric("requests_total", code="200") == 1
        assert await rig.metric("prompt_tokens_total") == 0


async def test_the_queue_timeout_of_a_body_bounds_the_wait_in_the_gateway() -> None:
    async with pods(busy) as (pod,), gateway_to(pod.address, service={"pod_concurrency": 1}) as rig:
        running = asyncio.ensure_future(rig.post())
        await until(lambda: pod.completions)
        for patience in (0, 0.1):
            began = time.monotonic()
            got = await rig.post({**CHAT, "queue_timeout": patience})
            assert got.status_code == 503
            assert got.json()["error"]["code"] == "queue_timeout"
            assert got.headers["retry-after"]
            assert time.monotonic() - began >= patience
        running.cancel()
        await rig.settled()


async def test_a_pod_is_told_what_is_left_of_the_queue_timeout() -> None:
    release = asyncio.Event()

    async def script(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        if len(pod.completions) == 1:
            await release.wait()
        await ok(pod, request, writer)

    async with pods(script) as (pod,), gateway_to(pod.address, service={"pod_concurrency": 1}) as rig:
        body = json.dumps({**CHAT, "queue_timeout": 30}).encode()
        first = asyncio.ensure_future(rig.post(body))
        await until(lambda: pod.completions)
        second = asyncio.ensure_future(rig.post(body))
        service = rig.gateway.table.get("default/m")
        assert service is not None
        await until(lambda: rig.gateway.admission.waiting(service) == 1)
        release.set()
        assert [(await one).status_code for one in (first, second)] == [200, 200]
        assert pod.completions[0].body == body  # it did not wait: not a byte is changed
        assert 0 < pod.completions[1].json["queue_timeout"] < 30


async def test_pods_are_told_that_a_key_is_of_class_batch(tmp_path: Path) -> None:
    keys, entries = {}, ""
    for name in ("batch", "interactive"):
        keys[name], entry = key_entry(name, **{"class": name})
        entries += entry
    (tmp_path / "keys.yaml").write_text("keys:\n" + entries)
    config = {"keys_file": str(tmp_path / "keys.yaml")}
    async with pods(ok) as (pod,), gateway_to(pod.address, config=config) as rig:
        for name, said, told in (
            ("batch", {}, "batch"),
            ("batch", {"priority_class": "interactive"}, "batch"),
            ("interactive", {}, None),
            ("interactive", {"priority_class": "batch"}, "batch"),
        ):
            headers = {"authorization": f"Bearer {keys[name]}"}
            got = await rig.post({**CHAT, **said}, headers=headers)
            assert got.status_code == 200
            assert pod.completions[-1].json.get("priority_class") == told
