"""The Messages API at the gateway: keys, errors in Anthropic's shape, counts without a pod."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types.shared import ErrorResponse
from engines import BLOCK
from gateway_rig import (
    STREAM_HEAD,
    Received,
    ScriptedPod,
    answer,
    chunked,
    gateway_to,
    movable,
    pods,
    until,
)

from leadline.gateway.access.keys import key_entry
from leadline.gateway.tokens.service import TokenService
from leadline.protocol.http.answers import error_body

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
ASK: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
USAGE = {"input_tokens": 3, "cache_read_input_tokens": 16, "output_tokens": 2}
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "Hi."}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": USAGE,
}


def event(name: str, **fields: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


def text_delta(text: str) -> bytes:
    return event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})


OPENING = event("message_start", message=MESSAGE | {"content": [], "stop_reason": None}) + event("ping")
BLOCK_START = event("content_block_start", index=0, content_block={"type": "text", "text": ""})
ENDING = event("content_block_stop", index=0) + event(
    "message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 2}
)
LAST = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


async def speaks(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
    """A pod that answers messages."""
    if request.method == "GET":
        writer.write(answer(b"{}"))
    elif request.json.get("stream"):
        body = OPENING + BLOCK_START + text_delta("Hi.") + ENDING + LAST
        writer.write(STREAM_HEAD + chunked(body) + b"0\r\n\r\n")
    else:
        writer.write(answer(json.dumps(MESSAGE).encode()))


def failed(got: httpx.Response, code: int, kind: str) -> str:
    """The message of an error in Anthropic's shape."""
    assert got.status_code == code, got.text
    body = got.json()
    ErrorResponse.model_validate(body, strict=True)
    assert (body["error"]["type"], set(body["error"])) == (kind, {"type", "message"})
    assert body["request_id"] == got.headers["x-request-id"]
    return str(body["error"]["message"])


def with_key(folder: Path, **limits: int) -> tuple[str, dict[str, Any]]:
    key, entry = key_entry("alice", **limits)
    file = folder / "keys.yaml"
    file.write_text("keys:\n" + entry)
    return key, {"config": {"keys_file": str(file)}}


async def test_a_key_in_x_api_key_counts_and_never_reaches_the_pod(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    key, options = with_key(tmp_path)
    async with pods(speaks) as (pod,), gateway_to(pod.address, access_log=True, **options) as rig:
        for headers in ({}, {"x-api-key": "sk-wrong"}, {"x-api-key": ""}):
            for path in (PATH, COUNT):
                failed(await rig.post(ASK, path, headers=headers), 401, "authentication_error")
        different = {"x-api-key": key, "Authorization": "Bearer sk-other"}
        assert "different keys" in failed(
            await rig.post(ASK, PATH, headers=different), 400, "invalid_request_error"
        )
        async with rig.client() as client:
            twice = [("x-api-key", key), ("x-api-key", key)]
            failed(await client.post(PATH, json=ASK, headers=twice), 400, "invalid_request_error")
            assert (await client.get("/v1/models", headers={"x-api-key": key})).status_code == 200
        assert pod.received == []
        for headers in ({"x-api-key": key}, {"x-api-key": key, "Authorization": f"Bearer {key}"}):
            assert (await rig.post(ASK, PATH, headers=headers)).status_code == 200
        assert not any(key in value for request in pod.received for _, value in request.headers)
        await rig.settled()
    assert key.encode() not in b"".join(capfdbinary.readouterr())


async def test_anthropics_client_reads_answers_and_streams() -> None:
    async with pods(speaks) as (pod,), gateway_to(pod.address) as rig:
        client = anthropic.AsyncAnthropic(base_url=rig.url, api_key="any", max_retries=0)
        whole = await client.messages.create(**ASK, extra_headers={"anthropic-beta": "a-2026-01-01"})
        assert whole.content[0].text == "Hi."  # type: ignore[union-attr]
        assert await rig.metric("prompt_tokens_total") == 19
        async with client.messages.stream(**ASK) as stream:
            assert (await stream.get_final_message()).stop_reason == "end_turn"
        assert pod.completions[0].one("anthropic-beta") == "a-2026-01-01"
        assert pod.completions[0].one("anthropic-version")
        await rig.settled()


async def test_errors_of_the_gateway_have_anthropics_shape() -> None:
    async with pods(speaks) as (pod,), gateway_to(pod.address, max_body_bytes=5000) as rig:
        failed(await rig.post(ASK | {"model": "other"}, PATH), 404, "not_found_error")
        for path in (PATH, COUNT):
            failed(await rig.post(b"{", path), 400, "invalid_request_error")
            failed(await rig.post(b" " * 6000, path), 413, "invalid_request_error")
            zipped = {"content-encoding": "gzip"}
            failed(await rig.post(ASK, path, headers=zipped), 415, "invalid_request_error")
            async with rig.client() as client:
                failed(await client.get(path), 405, "invalid_request_error")
        failed(await rig.post(ASK, f"{PATH}/batches"), 404, "not_found_error")
        assert pod.received == []
        late = await rig.post(ASK | {"deadline": 1e-9}, PATH)
        failed(late, 504, "timeout_error")
        await rig.settled()


async def test_without_pods_the_gateway_is_overloaded() -> None:
    async with gateway_to() as rig:
        got = await rig.post(ASK | {"queue_timeout": 0.01}, PATH)
        failed(got, 529, "overloaded_error")
        assert got.headers["retry-after"]
        client = anthropic.AsyncAnthropic(base_url=rig.url, api_key="any", max_retries=0)
        with pytest.raises(anthropic.OverloadedError):
            await client.messages.create(**ASK, extra_body={"queue_timeout": 0.01})


async def test_a_request_without_a_head_is_refused_in_the_shape_of_its_path() -> None:
    async with gateway_to(request_timeout=0.5) as rig:
        host, port = rig.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nlong: " + b"x" * (80 << 10) + b"\r\n\r\n")
        head, body = (await reader.read()).split(b"\r\n\r\n")
        assert b" 431 " in head
        ErrorResponse.model_validate_json(body, strict=True)
        writer.close()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n{")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 408 " in head
        ErrorResponse.model_validate_json(await reader.read(), strict=True)
        writer.close()


async def test_a_pod_that_is_overloaded_sends_the_request_to_another() -> None:
    full = answer(b"{}", status=529, headers="Retry-After: 1")
    refused = []

    async def refuses_once(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        if request.method == "POST" and not refused:
            refused.append(pod)
            writer.write(full)
        else:
            await speaks(pod, request, writer)

    async with pods(refuses_once, refuses_once) as two, gateway_to(*[pod.address for pod in two]) as rig:
        assert (await rig.post(ASK, PATH)).status_code == 200
        assert await rig.metric("retries_total", reason="status_503") == 1
        assert [len(pod.completions) for pod in two] == [1, 1]
        await rig.settled()


async def test_a_stream_moves_to_another_pod_and_its_notes_stay_inside() -> None:
    cut = (
        OPENING + b": tokens \n\n" + BLOCK_START + text_delta("Hi") + b": tokens 7,8\n\n" + text_delta(" lo")
    )

    async def dies(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        body = cut
        if request.json.get("resume_token_ids"):
            body = OPENING + b": tokens \n\n" + text_delta(" again") + b": tokens 9\n\n" + ENDING
            body += b": usage 19 3 16\n\n" + LAST + b": end\n\n"
        writer.write(STREAM_HEAD + chunked(body))
        await writer.drain()
        writer.transport.abort()

    script = movable(dies)
    async with pods(script, script) as two, gateway_to(*[p.address for p in two], migration="auto") as rig:
        got = await rig.post(ASK | {"stream": True}, PATH)
        assert got.content == OPENING + BLOCK_START + text_delta("Hi") + text_delta(" again") + ENDING + LAST
        first, second = [pod.completions[0].json for pod in two if pod.completions][:2]
        if first.get("resume_token_ids"):
            first, second = second, first
        assert second["resume_token_ids"] == [7, 8]
        assert first["answer_id"] == second["answer_id"]
        assert first["answer_id"].startswith("msg_")
        assert first["seed"] == second["seed"]
        assert await rig.metric("prompt_tokens_total") == 19
        await rig.settled()


async def test_a_stream_that_cannot_move_ends_with_an_error_event() -> None:
    async def dies(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(OPENING + BLOCK_START))
        await writer.drain()
        writer.transport.abort()

    async with pods(dies) as (pod,), gateway_to(pod.address) as rig:
        got = await rig.post(ASK | {"stream": True}, PATH)
        name, data = got.text.split("\n\n")[-2].split("\n")
        assert name == "event: error"
        ErrorResponse.model_validate_json(data.removeprefix("data: "), strict=True)
        client = anthropic.AsyncAnthropic(base_url=rig.url, api_key="any", max_retries=0)
        with pytest.raises(anthropic.APIStatusError, match="the pod was lost"):
            async with client.messages.stream(**ASK) as stream:
                await stream.get_final_message()
        await rig.settled()


async def test_a_count_asks_no_pod_and_is_one_request_of_its_keys_limit(
    model_folder: Path, tmp_path: Path
) -> None:
    exact = {"tokenizer": "auto", "model": str(model_folder), "block_size": BLOCK}
    key, options = with_key(tmp_path, requests_per_minute=2, tokens_per_minute=1)
    async with pods(speaks) as (pod,), gateway_to(pod.address, service=exact, **options) as rig:
        service = rig.gateway.table.get("default/m")
        assert service is not None
        await until(lambda: isinstance(service.tokens, TokenService), 30)
        client = anthropic.AsyncAnthropic(base_url=rig.url, api_key=key, max_retries=0)
        body = {name: value for name, value in ASK.items() if name != "max_tokens"}
        one = (await client.messages.count_tokens(**body)).input_tokens
        more = (await client.messages.count_tokens(**body, system="Be brief.")).input_tokens
        assert {one, more} == {31, 18}
        assert {request.path for request in pod.completions} <= {"/tokenize"}
        with pytest.raises(anthropic.RateLimitError):
            await client.messages.count_tokens(**body)
        await rig.settled()


def test_only_the_path_of_messages_has_anthropics_errors() -> None:
    for path, wanted in ((PATH, "error"), (f"{PATH}/x", "error"), (f"{PATH}s", None), ("/v1/mess", None)):
        assert json.loads(error_body(path, 400, "no")[1]).get("type") == wanted
    assert error_body(PATH, 429, "full", code="queue_full")[0] == 529
    assert error_body(PATH, 429, "slow down", code="rate_limit_exceeded")[0] == 429
