"""A server that runs one request at a time, with space for one more: the answers to the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from live_server import BLOCK, WARM_PROMPT, LiveServer

LONG: dict[str, Any] = {"model": "strict", "prompt": "One two", "max_tokens": 400, "temperature": 0}


@pytest.fixture
async def client(narrow_server: LiveServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{narrow_server.url}/v1", api_key="key-one", timeout=60, max_retries=0
    ) as client:
        yield client


@asynccontextmanager
async def busy(server: LiveServer, client: openai.AsyncOpenAI, waiting: int = 0) -> AsyncIterator[None]:
    """One stream runs, `waiting` more requests wait."""
    stream = await client.completions.create(**LONG, stream=True, extra_body={"ignore_eos": True})
    await anext(aiter(stream))
    others = [asyncio.ensure_future(client.completions.create(**LONG)) for _ in range(waiting)]
    await asyncio.to_thread(server.until, lambda: server.metric("waiting_requests") == waiting)
    try:
        yield
    finally:
        await stream.close()
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.to_thread(
            server.until,
            lambda: server.metric("running_requests") == server.metric("waiting_requests") == 0,
        )


async def test_prompts_of_the_warmup_file_are_cached_from_the_start(
    narrow_server: LiveServer, client: openai.AsyncOpenAI
) -> None:
    answer = await client.completions.create(model="strict", prompt=WARM_PROMPT, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens // BLOCK * BLOCK > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_a_429_with_retry_after(
    narrow_server: LiveServer, client: openai.AsyncOpenAI, stream: bool
) -> None:
    """E12."""
    async with busy(narrow_server, client, waiting=1):
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(**LONG, stream=stream)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert caught.value.code == "queue_full"
    assert caught.value.type == "rate_limit_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt": ["a", "b", "c"]}, "prompt"), ({"prompt": ["a", "b"], "n": 2}, "prompt"), ({"n": 3}, "n")],
)
async def test_what_would_not_fit_an_empty_server_is_a_400(
    client: openai.AsyncOpenAI, fields: dict[str, Any], param: str
) -> None:
    """A 429 would make clients retry without end."""
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(**{**LONG, **fields, "max_tokens": 1})
    assert caught.value.param == param
    assert "2 in all" in caught.value.message
    fits = await client.completions.create(**{**LONG, "prompt": ["a", "b"], "max_tokens": 1})
    assert len(fits.choices) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_waiting_longer_than_the_queue_timeout_is_a_503(
    narrow_server: LiveServer, client: openai.AsyncOpenAI, stream: bool
) -> None:
    async with busy(narrow_server, client):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(**LONG, stream=stream, extra_body={"queue_timeout": 0.2})
    assert caught.value.status_code == 503
    assert caught.value.code == "queue_timeout"
    assert int(caught.value.response.headers["retry-after"]) >= 1


async def test_a_queue_timeout_of_zero_is_served_where_there_is_room(
    narrow_server: LiveServer, client: openai.AsyncOpenAI
) -> None:
    now = {**LONG, "max_tokens": 2}
    answer = await client.completions.create(**now, extra_body={"queue_timeout": 0})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    async with busy(narrow_server, client):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(**now, extra_body={"queue_timeout": 0})
    assert caught.value.code == "queue_timeout"


async def test_a_deadline_that_passes_is_a_504(narrow_server: LiveServer, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await client.completions.create(**LONG, extra_body={"deadline": 0.5, "ignore_eos": True})
    assert caught.value.status_code == 504
    assert caught.value.code == "deadline_exceeded"


async def test_a_deadline_that_passes_in_a_stream_is_an_error_event(
    narrow_server: LiveServer, client: openai.AsyncOpenAI
) -> None:
    async def start(deadline: float) -> openai.AsyncStream[Any]:
        try:
            return await client.completions.create(
                **LONG, stream=True, extra_body={"deadline": deadline, "ignore_eos": True}
            )
        except openai.APIStatusError:
            # A busy machine may need more than that for the first token, which is a 504: give it longer.
            if deadline > 10:
                raise
            return await start(2 * deadline)

    async def drain(stream: openai.AsyncStream[Any]) -> None:
        async for chunk in stream:
            chunks.append(chunk)

    chunks: list[Any] = []
    logged = narrow_server.log.count("ERROR")
    stream = await start(0.5)
    with pytest.raises(openai.APIError, match="deadline") as caught:
        await drain(stream)
    assert caught.value.code == "deadline_exceeded"
    assert chunks
    assert narrow_server.log.count("ERROR") == logged


async def test_outcomes_are_counted(narrow_server: LiveServer, client: openai.AsyncOpenAI) -> None:
    before = narrow_server.metric("requests_total", endpoint="completions", outcome="deadline")
    with pytest.raises(openai.APIStatusError):
        await client.completions.create(**LONG, extra_body={"deadline": 0.2, "ignore_eos": True})
    assert narrow_server.metric("requests_total", endpoint="completions", outcome="deadline") == before + 1
