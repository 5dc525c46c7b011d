"""A client that leaves frees what it held, streaming or not (E11)."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from live_server import LiveServer

LONG: dict[str, Any] = {
    "prompt": "Count: one two three",
    "max_tokens": 450,
    "temperature": 0,
    "ignore_eos": True,
}


def idle(server: LiveServer) -> bool:
    return server.metric("running_requests") == server.metric("waiting_requests") == 0


def test_a_client_that_closes_its_stream_frees_the_request(server: LiveServer) -> None:
    server.until(lambda: idle(server))
    generated = server.metric("generation_tokens_total")
    with (
        server.http as http,
        http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response,
    ):
        next(response.iter_raw())
        assert not idle(server) or server.metric("heartbeat_age_seconds") < 1
    server.until(lambda: idle(server))
    assert server.metric("generation_tokens_total") - generated < 200
    assert server.metric("kv_blocks_used") == 0


def test_a_client_that_leaves_without_an_answer_frees_the_request(server: LiveServer) -> None:
    server.until(lambda: idle(server))
    aborted = server.metric("requests_total", endpoint="completions", outcome="abort")
    with server.http as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=LONG, timeout=1.0)
    server.until(lambda: idle(server))
    server.until(
        lambda: server.metric("requests_total", endpoint="completions", outcome="abort") == aborted + 1
    )


def test_all_choices_and_prompts_of_a_request_are_freed(server: LiveServer) -> None:
    body = {**LONG, "prompt": ["One", "Two", "Three"], "n": 2, "stream": True, "temperature": 1}
    with server.http as http, http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_raw())
    server.until(lambda: idle(server))
    assert server.metric("kv_blocks_used") == 0


async def test_many_streams_run_side_by_side_and_some_leave(server: LiveServer) -> None:
    async def one(client: httpx.AsyncClient, number: int) -> int:
        body = {**LONG, "prompt": f"Item {number}:", "stream": True, "max_tokens": 6}
        events = 0
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                events += line.startswith("data: ")
                if number % 4 == 0 and events == 2:
                    return events
                assert '"error"' not in line
        return events

    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        counts = await asyncio.gather(*(one(client, number) for number in range(48)))
    assert all(count == 2 for count in counts[::4])
    # Six tokens and [DONE]; a token that ends inside a character or brings no text has no event of its own.
    assert all(3 <= count <= 7 for number, count in enumerate(counts) if number % 4)
    await asyncio.to_thread(server.until, lambda: idle(server))
