"""Keys, models and limits as clients meet them over HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_rig import (
    CHAT,
    STREAM,
    STREAM_HEAD,
    Received,
    Rig,
    ScriptedPod,
    answer,
    busy,
    chunked,
    completion,
    gateway_to,
    movable,
    ok,
    pods,
    sse,
    until,
)

from leadline.gateway.access.keys import key_entry
from leadline.gateway.request.body import read_incoming
from leadline.gateway.request.prompt import RoutedPrompt, expected_tokens
from leadline.protocol.anthropic.request import MessagesRequest


def keys_file(folder: Path, **fields: Any) -> tuple[str, dict[str, Any]]:
    key, entry = key_entry("alice", **fields)
    file = folder / "keys.yaml"
    file.write_text("keys:\n" + entry)
    return key, {"config": {"keys_file": str(file)}}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_a_key_is_needed_and_never_reaches_the_pod(tmp_path: Path) -> None:
    key, options = keys_file(tmp_path)
    async with pods(ok) as (pod,), gateway_to(pod.address, **options) as rig:
        for headers in ({}, bearer("sk-wrong"), {"Authorization": "Basic x"}):
            got = await rig.post(headers=headers)
            assert got.status_code == 401
            assert got.json()["error"]["code"] == "invalid_api_key"
            assert got.headers["www-authenticate"] == "Bearer"
        assert pod.received == []
        assert (await rig.post(headers=bearer(key))).status_code == 200
        assert pod.completions[0].one("authorization") is None
        async with rig.client() as client:
            assert (await client.get("/v1/models")).status_code == 401
            assert (await client.get("/v1/models", headers=bearer(key))).status_code == 200
            assert (await client.get("/health")).status_code == 200
        await rig.settled()


async def test_a_key_may_be_kept_to_some_models(tmp_path: Path) -> None:
    key, options = keys_file(tmp_path, models=["other-*"])
    async with pods(ok) as (pod,), gateway_to(pod.address, **options) as rig:
        got = await rig.post(headers=bearer(key))
        assert got.status_code == 403
        assert got.json()["error"]["code"] == "model_not_allowed"
        async with rig.client() as client:
            assert (await client.get("/v1/models", headers=bearer(key))).json()["data"] == []


async def test_leaving_out_the_model_is_no_way_around_the_keys_list(tmp_path: Path) -> None:
    key, options = keys_file(tmp_path, models=["other-*"])
    body = {"messages": CHAT["messages"]}
    async with pods(ok) as (pod,), gateway_to(pod.address, **options) as rig:
        assert (await rig.post(body, headers=bearer(key))).status_code == 403
        assert pod.received == []


async def test_limits_are_told_and_kept(tmp_path: Path) -> None:
    key, options = keys_file(tmp_path, requests_per_minute=2, tokens_per_minute=1000)
    body = {**CHAT, "max_tokens": 100}
    async with pods(ok) as (pod,), gateway_to(pod.address, **options) as rig:
        first = await rig.post(body, headers=bearer(key))
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert int(first.headers["x-ratelimit-remaining-tokens"]) < 900
        await until(lambda: rig.gateway.in_flight == 0)
        second = await rig.post(body, headers=bearer(key))
        # The first took 7 tokens and not the hundred it might have.
        assert int(second.headers["x-ratelimit-remaining-tokens"]) > 870
        third = await rig.post(body, headers=bearer(key))
        assert third.status_code == 429
        assert int(third.headers["retry-after"]) >= 1
        assert third.headers["x-ratelimit-remaining-requests"] == "0"
        assert third.json()["error"]["type"] == "rate_limit_error"
        assert len(pod.completions) == 2
        await rig.settled()


@pytest.mark.parametrize("code", [400, 503])
async def test_refused_requests_cost_no_tokens(tmp_path: Path, code: int) -> None:
    async def script(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        first = len(pod.completions) == 1
        writer.write(answer(completion(), status=code if first else 200))

    key, options = keys_file(tmp_path, tokens_per_minute=1000)
    body = {**CHAT, "max_tokens": 400}
    async with pods(script) as (pod,), gateway_to(pod.address, **options) as rig:
        assert (await rig.post(body, headers=bearer(key))).status_code == code
        await until(lambda: rig.gateway.in_flight == 0)
        got = await rig.post(body, headers=bearer(key))
        assert int(got.headers["x-ratelimit-remaining-tokens"]) > 580


async def words(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
    """A stream of a hundred tokens, one an event, which does not say what it took."""
    if request.method == "GET":
        writer.write(answer(b"{}"))
        return
    writer.write(STREAM_HEAD)
    for token in range(100):
        choice = {"index": 0, "delta": {"content": "w "}, "token_ids": [token]}
        writer.write(chunked(sse({"id": "c", "created": 1, "choices": [choice]})))
        await asyncio.sleep(0.002)
    writer.write(chunked(sse("[DONE]")) + b"0\r\n\r\n")


async def used_tokens(rig: Rig, headers: dict[str, str]) -> int:
    """What the key has used before this request, which takes none worth speaking of."""
    await until(lambda: rig.gateway.in_flight == 0)
    got = await rig.post({**CHAT, "max_tokens": 1}, headers=headers)
    return 10_000 - int(got.headers["x-ratelimit-remaining-tokens"])


@pytest.mark.parametrize("migration", ["auto", "off"])
@pytest.mark.parametrize("limit", [{}, {"max_tokens": 4000}])
async def test_a_stream_that_does_not_say_its_usage_is_charged_for_what_passed(
    tmp_path: Path, migration: str, limit: dict[str, int]
) -> None:
    key, options = keys_file(tmp_path, tokens_per_minute=10_000)
    async with pods(movable(words)) as (pod,), gateway_to(pod.address, migration=migration, **options) as rig:
        assert (await rig.post({**STREAM, **limit}, headers=bearer(key))).status_code == 200
        await until(lambda: rig.gateway.in_flight == 0)
        assert 100 <= await rig.metric("completion_tokens_total") <= 101
        assert 100 <= await used_tokens(rig, bearer(key)) <= 150
        await rig.settled()


@pytest.mark.parametrize("migration", ["auto", "off"])
async def test_a_client_that_leaves_is_charged_for_what_it_got(tmp_path: Path, migration: str) -> None:
    key, options = keys_file(tmp_path, tokens_per_minute=10_000)
    body = {**STREAM, "max_tokens": 4000}
    async with pods(movable(words)) as (pod,), gateway_to(pod.address, migration=migration, **options) as rig:
        async with (
            rig.client() as client,
            client.stream("POST", "/v1/chat/completions", json=body, headers=bearer(key)) as answer,
        ):
            lines = answer.aiter_lines()
            got = 0
            while got < 60:
                got += (await anext(lines)).startswith("data:")
        assert 60 <= await used_tokens(rig, bearer(key)) <= 140
        await rig.settled()


async def test_a_client_that_leaves_before_its_answer_is_charged_for_its_prompt(tmp_path: Path) -> None:
    key, options = keys_file(tmp_path, tokens_per_minute=10_000)
    body = {"model": "m", "max_tokens": 4000, "messages": [{"role": "user", "content": "word " * 400}]}
    async with pods(busy) as (pod,), gateway_to(pod.address, **options) as rig:
        asking = asyncio.ensure_future(rig.post(body, headers=bearer(key)))
        await until(lambda: pod.completions)
        asking.cancel()
        await until(lambda: rig.gateway.in_flight == 0)
        pod.script = ok
        assert 450 <= await used_tokens(rig, bearer(key)) <= 600
        await rig.settled()


def test_the_command_makes_keys_that_work(tmp_path: Path) -> None:
    from leadline.gateway.access.keys import KeyRing

    command = [sys.executable, "-m", "leadline.cli.main", "gateway", "hash-key", "--key-name", "bob"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    key, entry = done.stdout.splitlines()
    (tmp_path / "keys.yaml").write_text(f"keys:\n{entry}\n")
    assert KeyRing(tmp_path / "keys.yaml").authenticate(f"Bearer {key}").name == "bob"


@pytest.mark.parametrize(
    ("max_tokens", "context", "expected"),
    [(100, 2000, 107), (32_000, 2000, 2007), (10**400, 2000, 2007), (10**400, None, (1 << 20) + 7)],
)
def test_a_request_counts_as_no_more_output_than_the_context_takes(
    max_tokens: int, context: int | None, expected: int
) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":%d}' % max_tokens
    report = None if context is None else SimpleNamespace(max_model_len=context)
    pod = SimpleNamespace(report=report, ready=True, draining=False)
    service: Any = SimpleNamespace(pods={"a": pod}, namespaces=[report])
    prompt = RoutedPrompt((), 7, True)
    assert expected_tokens(service, read_incoming(body, MessagesRequest), prompt) == expected
