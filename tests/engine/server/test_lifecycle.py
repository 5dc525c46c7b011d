"""Start, drain, death and restart of whole servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from live_server import LONG_CONTEXT, LiveServer, serving

LONG = {"prompt": "One two three", "max_tokens": 8000, "temperature": 0, "ignore_eos": True, "stream": True}


def ready(server: LiveServer) -> int:
    with contextlib.suppress(httpx.TransportError), server.http as http:
        return http.get("/ready").status_code
    return 0


def test_sigterm_finishes_running_streams_refuses_new_ones_and_exits_0(small_model: Path) -> None:
    with serving(small_model, LONG_CONTEXT, "--drain-timeout=60") as server:
        body = {**LONG, "max_tokens": 1000}
        with server.http as http, http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            server.until(lambda: ready(server) == 503)
            refused = server.post("/v1/completions", prompt="a", max_tokens=1)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "draining"
            with server.http as other:
                assert other.get("/health").status_code == 200
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(15) == 0


def test_a_drain_that_takes_too_long_ends_streams_with_an_error_event(small_model: Path) -> None:
    with serving(small_model, LONG_CONTEXT, "--drain-timeout=0.5") as server:
        with server.http as http, http.stream("POST", "/v1/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert "shut down" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
        assert server.process.wait(15) == 0


async def test_a_killed_core_fails_requests_and_ends_the_server(small_model: Path) -> None:
    with serving(small_model, LONG_CONTEXT) as server:
        core = server.core()
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
            whole = asyncio.ensure_future(http.post("/v1/completions", json={**LONG, "stream": False}))
            async with http.stream("POST", "/v1/completions", json=LONG) as response:
                lines = response.aiter_lines()
                await anext(lines)
                await asyncio.to_thread(server.until, lambda: server.metric("running_requests") == 2)
                killed = time.monotonic()
                core.kill()
                answer = await whole
                assert time.monotonic() - killed < 1.5
                rest = [line async for line in lines if line]
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_dead"
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert error["type"] == "server_error"
        assert server.process.wait(15) == 1
        assert "killed by signal 9" in server.log
        assert "Traceback" not in server.log


def test_a_killed_server_leaves_no_core_behind_and_starts_again(small_model: Path) -> None:
    """E24."""
    with serving(small_model) as server:
        core = server.core()
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(10)
        core.wait(10)
        with serving(small_model) as again:
            assert again.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200


def test_two_servers_share_a_host(server: LiveServer, small_model: Path) -> None:
    """E24."""
    with serving(small_model, "--served-name=other") as other:
        assert other.url != server.url
        assert other.model == "other"
        for one in (server, other):
            assert one.client.completions.create(model=one.model, prompt="a", max_tokens=1).choices
        with pytest.raises(openai.NotFoundError):
            other.client.completions.create(model="smollm2", prompt="a", max_tokens=1)


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        ("/no/such/model", (), "no model at /no/such/model"),
        ("smollm2", ("--max-model-len=1000000",), "max_model_len"),
        ("smollm2", ("--block-size=7",), "block_size must be"),
        ("smollm2", ("--eviction-policy=nonsense",), "nonsense"),
    ],
)
def test_what_keeps_a_server_from_starting_is_said_in_one_line(
    model: str, options: tuple[str, ...], reason: str
) -> None:
    with serving(model, "--log-level=error", *options, wait=False) as server:
        assert server.process.wait(60) == 1
        (line,) = server.log.splitlines()
        assert line.startswith("leadline: ")
        assert reason in line


def test_a_port_in_use_is_said_in_one_line(server: LiveServer) -> None:
    port = server.url.rsplit(":", 1)[1]
    with serving("smollm2", f"--port={port}", "--log-level=error", wait=False) as second:
        assert second.process.wait(60) == 1
        (line,) = second.log.splitlines()
        assert f"cannot listen on 127.0.0.1:{port}" in line


def test_the_log_tells_the_beginning_and_the_end_of_reading_the_weights() -> None:
    """Lines in between come every ten seconds, so a fast machine prints none."""
    with serving("smollm2", "--cpu-threads=2") as server:
        log = server.log
    shares = [int(share) for share in re.findall(r"loading weights (\d+)%", log)]
    assert (shares[0], shares[-1]) == (0, 100)
    assert shares == sorted(shares)
    assert "loading weights 100%: 0.54 of 0.54 GB" in log


def test_while_the_model_loads_health_is_200_and_ready_503() -> None:
    with serving("smollm2", wait=False) as server:
        process = psutil.Process(server.process.pid)

        def listening() -> bool:
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    server.url = f"http://127.0.0.1:{connection.laddr.port}"
            return bool(server.url)

        server.until(listening, 60)
        with server.http as http:
            health = http.get("/health")
            assert (health.status_code, health.json()["status"]) == (200, "starting")
            loading = http.get("/ready")
            assert loading.status_code == 503
            server.until(lambda: "progress" in http.get("/health").json())
            assert http.get("/health").json()["progress"]["phase"]
            refused = http.post("/v1/completions", json={"prompt": "a"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
            assert refused.headers["retry-after"]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
