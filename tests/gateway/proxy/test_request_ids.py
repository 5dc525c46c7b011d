"""X-Request-ID: the client's, or one of ours, in the answer and at the pod."""

from __future__ import annotations

import asyncio

import openai
import pytest
from gateway_rig import (
    CHAT,
    STREAM,
    STREAM_HEAD,
    Received,
    ScriptedPod,
    answer,
    chunked,
    completion,
    gateway_to,
    movable,
    ok,
    pods,
)


async def test_a_clients_id_goes_to_the_pod_and_comes_back() -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig:
        got = await rig.post(headers={"X-Request-ID": "Trace-42/a"})
        assert got.headers.get_list("x-request-id") == ["Trace-42/a"]
        assert pod.completions[0].one("x-request-id") == "Trace-42/a"


@pytest.mark.parametrize("given", [None, "", "two words", "x" * 129, "caf\u00e9"])
async def test_without_a_fit_one_each_request_gets_its_own(given: str | None) -> None:
    headers = {} if given is None else {"X-Request-ID": given.encode("latin-1")}
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig:
        ids = [(await rig.post(headers=headers)).headers.get_list("x-request-id") for _ in range(2)]
        assert [one.one("x-request-id") for one in pod.completions] == [one for (one,) in ids]
        assert ids[0] != ids[1]
        assert given not in (ids[0][0], ids[1][0])


async def test_it_is_the_gateways_not_the_pods_that_clients_see() -> None:
    """The gateway's is the one in its log."""

    async def script(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(completion(), headers="Content-Type: application/json\r\nX-Request-Id: 7"))

    async with pods(script) as (pod,), gateway_to(pod.address) as rig:
        got = await rig.post()
        assert got.headers.get_list("x-request-id") == [pod.completions[0].one("x-request-id")]


async def test_errors_and_streams_have_one_too() -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig:
        refused = await rig.post(b"{")
        assert refused.status_code == 400
        assert refused.headers["x-request-id"]
        stream = await rig.post(STREAM)
        assert stream.status_code == 200
        assert stream.headers["x-request-id"] == pod.completions[0].one("x-request-id")


async def test_a_stream_that_no_pod_begins_has_one() -> None:
    async def half_an_event(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(b"data: ") + b"0\r\n\r\n")

    async with (
        pods(movable(half_an_event)) as (pod,),
        gateway_to(pod.address, migration="auto", max_migrations=0) as rig,
    ):
        got = await rig.post(STREAM)
        assert got.status_code == 502
        assert got.headers["x-request-id"] == pod.completions[0].one("x-request-id")


async def test_openais_client_tells_it() -> None:
    async with pods(ok) as (pod,), gateway_to(pod.address) as rig:
        client = openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0)
        made = await client.chat.completions.create(
            model=CHAT["model"], messages=[{"role": "user", "content": "hello"}]
        )
        assert made._request_id == pod.completions[0].one("x-request-id")
        with pytest.raises(openai.NotFoundError) as error:
            await client.chat.completions.create(model="none", messages=[{"role": "user", "content": "x"}])
        assert error.value.request_id
