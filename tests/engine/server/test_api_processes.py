"""`leadline serve --api-processes N`: several processes on one port before one engine core."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis
from live_server import LONG_CONTEXT, LiveServer, serving

from leadline.cli.valkey import EmbeddedValkey
from leadline.protocol.load import decode_report
from live_valkey import KEYS

PROCESSES = 3
LONG = {"prompt": "One two three", "max_tokens": 8000, "temperature": 0, "ignore_eos": True, "stream": True}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def wide(small_model: Path) -> Iterator[LiveServer]:
    with serving(small_model, LONG_CONTEXT, "--served-name=small", f"--api-processes={PROCESSES}") as server:
        assert len(server.workers()) == PROCESSES - 1
        yield server


def processes(server: LiveServer) -> list[psutil.Process]:
    """All that listen, the first one first."""
    return [psutil.Process(server.process.pid), *server.workers()]


Connections = dict[int, list[http.client.HTTPConnection]]


def accepted(server: LiveServer) -> dict[int, int]:
    """Client's port → process id of the one that accepted its connection."""
    owners = {}
    for process in processes(server):
        with contextlib.suppress(psutil.Error):
            owners.update({c.raddr.port: process.pid for c in process.net_connections("tcp") if c.raddr})
    return owners


@contextlib.contextmanager
def spread(server: LiveServer, each: int = 1) -> Iterator[Connections]:
    """At least `each` connections to every process, by process id. The kernel picks one for each connection,
    so many are made."""
    port = int(server.url.rsplit(":", 1)[1])
    pids = {process.pid for process in processes(server)}
    with contextlib.ExitStack() as stack:
        found: Connections = {}
        while min((len(found.get(pid, [])) for pid in pids), default=0) < each:
            made = [http.client.HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(16)]
            for connection in made:
                connection.connect()
                stack.callback(connection.close)
            ports = {connection.sock.getsockname()[1]: connection for connection in made}
            server.until(lambda ports=ports: ports.keys() <= accepted(server).keys())
            for number, pid in accepted(server).items():
                if number in ports:
                    found.setdefault(pid, []).append(ports[number])
        yield found


def ask(
    connection: http.client.HTTPConnection, path: str, body: dict[str, Any] | None = None, method: str = ""
) -> tuple[int, str]:
    data = None if body is None else json.dumps(body)
    connection.request(method or ("GET" if body is None else "POST"), path, data, JSON)
    response = connection.getresponse()
    return response.status, response.read().decode()


def begin(connection: http.client.HTTPConnection, body: dict[str, Any]) -> http.client.HTTPResponse:
    """A stream whose first event has come."""
    connection.request("POST", "/v1/completions", json.dumps(body), JSON)
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline().startswith(b"data: ")
    return response


def last_event(response: http.client.HTTPResponse) -> str:
    return [line for line in response.read().decode().splitlines() if line][-1]


def idle(server: LiveServer) -> bool:
    return server.metric("running_requests") == server.metric("waiting_requests") == 0


def test_streams_of_all_processes_get_the_tokens_of_one(wide: LiveServer, small_server: LiveServer) -> None:
    prompts = [f"{number} little ducks went swimming one day" for number in range(8)]

    def stream(number: int, connection: http.client.HTTPConnection) -> str:
        body = {"prompt": prompts[number % 8], "max_tokens": 16, "temperature": 0, "stream": True}
        lines = ask(connection, "/v1/completions", body)[1].splitlines()
        assert lines[-2] == "data: [DONE]"
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return "".join(choice["text"] for event in events for choice in event["choices"])

    with spread(wide, 4) as connections, ThreadPoolExecutor(12) as pool:
        flat = [connection for mine in connections.values() for connection in mine[:4]]
        texts = list(pool.map(stream, range(12), flat))
    alone = [
        small_server.post("/v1/completions", prompt=prompt, max_tokens=16, temperature=0).json()["choices"][
            0
        ]["text"]
        for prompt in prompts
    ]
    assert texts == [alone[number % 8] for number in range(12)]


def test_whoever_answers_metrics_answers_for_all(wide: LiveServer) -> None:
    wide.until(lambda: idle(wide))
    before = wide.metric("requests_total"), wide.metric("generation_tokens_total")
    pages = []
    with spread(wide) as connections:
        for mine in connections.values():
            body = {"prompt": "a", "max_tokens": 5, "ignore_eos": True}
            assert ask(mine[0], "/v1/completions", body)[0] == 200
        wide.until(lambda: idle(wide))
        for mine in connections.values():
            status, page = ask(mine[0], "/metrics")
            assert status == 200
            pages.append([line for line in page.splitlines() if "heartbeat_age" not in line])
    assert pages[0] == pages[1] == pages[2]
    after = wide.metric("requests_total"), wide.metric("generation_tokens_total")
    assert after == (before[0] + PROCESSES, before[1] + 5 * PROCESSES)
    names = [line.split()[2] for line in pages[0] if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_each_process_knows_the_whole_engine(wide: LiveServer) -> None:
    with spread(wide) as connections:
        for connection, *_ in connections.values():
            assert ask(connection, "/health") == (200, '{"status":"serving"}')
            assert ask(connection, "/ready")[0] == 200
            assert json.loads(ask(connection, "/v1/models")[1])["data"][0]["id"] == "small"
            status, answer = ask(connection, "/admin/warmup", {"prompts": ["The same long prompt " * 12]})
            assert (status, json.loads(answer)["prompts"]) == (200, 1)
            status, answer = ask(connection, "/admin/reset_prefix_cache", method="POST")
            assert status == 200
            assert json.loads(answer)["blocks"] > 0
            status, answer = ask(connection, "/admin/profile", {"steps": 1})
            assert json.loads(answer)["error"]["code"] == "profiling_off"  # as the core says
            assert ask(connection, "/v1/completions", {"prompt": "a", "model": "other"})[0] == 404


def test_a_client_that_leaves_any_process_frees_its_request(wide: LiveServer) -> None:
    with spread(wide) as connections:
        for connection, *_ in connections.values():
            wide.until(lambda: idle(wide))
            response = begin(connection, LONG)
            wide.until(lambda: wide.metric("running_requests") == 1)
            response.close()
            connection.close()
    wide.until(lambda: idle(wide))
    assert wide.metric("kv_blocks_used") == 0


def test_a_killed_worker_loses_its_own_requests_alone_and_another_takes_its_place(small_model: Path) -> None:
    with serving(small_model, LONG_CONTEXT, f"--api-processes={PROCESSES}") as server:
        first, doomed, other = processes(server)
        with spread(server) as connections:
            ask(
                connections[doomed.pid][0],
                "/v1/completions",
                {"prompt": "a", "max_tokens": 7, "ignore_eos": True},
            )
            counted = server.metric("generation_tokens_total")
            assert counted == 7
            body = {**LONG, "max_tokens": 1000}
            streams = [begin(connections[process.pid][0], body) for process in (first, doomed, other)]
            server.until(lambda: server.metric("running_requests") == 3)
            doomed.kill()
            with pytest.raises((http.client.HTTPException, OSError)):
                streams[1].read()
            server.until(lambda: server.metric("running_requests") <= 2, 5)
            assert last_event(streams[0]) == last_event(streams[2]) == "data: [DONE]"
        server.until(lambda: idle(server))
        assert server.metric("kv_blocks_used") == 0
        server.until(lambda: len(server.workers()) == PROCESSES - 1)
        (new,) = {worker.pid for worker in server.workers()} - {doomed.pid, other.pid}
        with spread(server) as connections:
            assert ask(connections[new][0], "/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
        assert server.metric("generation_tokens_total") >= counted + 2000
        assert f"API process {doomed.pid} was killed by signal 9" in server.log
        assert server.stop() == 0


def test_workers_that_die_again_and_again_end_the_server(small_model: Path) -> None:
    with serving(small_model, "--api-processes=2") as server:
        ends = time.monotonic() + 60
        while server.process.poll() is None and time.monotonic() < ends:
            with contextlib.suppress(psutil.Error):
                for worker in server.workers():
                    worker.kill()
            time.sleep(0.05)
        assert server.process.wait(15) == 1
        assert "die again and again" in server.log.splitlines()[-1]


def test_sigterm_finishes_the_streams_of_all_processes_and_refuses_new_ones(small_model: Path) -> None:
    with serving(small_model, LONG_CONTEXT, f"--api-processes={PROCESSES}", "--drain-timeout=60") as server:
        everyone = [*processes(server), server.core()]
        with spread(server, 2) as connections:
            streams = [begin(mine[0], {**LONG, "max_tokens": 1000}) for mine in connections.values()]
            # To the whole group, as a terminal's Ctrl-C: only the first process may act on it.
            for process in processes(server):
                process.send_signal(signal.SIGINT)
            for _, idle_one, *_ in connections.values():
                server.until(lambda idle_one=idle_one: ask(idle_one, "/ready")[0] == 503)
                status, answer = ask(idle_one, "/v1/completions", {"prompt": "a", "max_tokens": 1})
                assert (status, json.loads(answer)["error"]["code"]) == (503, "draining")
                assert ask(idle_one, "/health")[0] == 200
            assert {last_event(stream) for stream in streams} == {"data: [DONE]"}
        assert server.process.wait(15) == 0
        assert not psutil.wait_procs(everyone, 5)[1]


def test_a_drain_that_takes_too_long_ends_the_streams_of_all_processes(small_model: Path) -> None:
    with serving(small_model, LONG_CONTEXT, f"--api-processes={PROCESSES}", "--drain-timeout=0.5") as server:
        with spread(server) as connections:
            streams = [begin(mine[0], LONG) for mine in connections.values()]
            server.process.send_signal(signal.SIGTERM)
            for stream in streams:
                assert "shut down" in json.loads(last_event(stream)[6:])["error"]["message"]
        assert server.process.wait(15) == 0
        assert f"drained, {PROCESSES} requests aborted" in server.log


def test_a_killed_core_ends_the_streams_of_all_processes_and_the_server(small_model: Path) -> None:
    with serving(small_model, LONG_CONTEXT, f"--api-processes={PROCESSES}") as server:
        workers = server.workers()
        with spread(server) as connections:
            streams = [begin(mine[0], LONG) for mine in connections.values()]
            server.core().kill()
            for stream in streams:
                assert json.loads(last_event(stream)[6:])["error"]["type"] == "server_error"
        assert server.process.wait(15) == 1
        assert not psutil.wait_procs(workers, 5)[1]
        assert "Traceback" not in server.log


def test_a_killed_first_process_leaves_nobody_behind(small_model: Path) -> None:
    with serving(small_model, "--api-processes=2") as server:
        others = [*server.workers(), server.core()]
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(10)
        _, alive = psutil.wait_procs(others, 10)
        assert not alive


def test_whoever_finds_one_process_ready_finds_all_ready(small_model: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with serving(small_model, f"--port={port}", f"--api-processes={PROCESSES}", wait=False) as server:
        server.url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            with contextlib.suppress(httpx.TransportError), server.http as fresh:
                return fresh.get("/ready").status_code == 200
            return False

        server.until(ready, 120)
        assert all(ready() for _ in range(40))


def test_a_second_server_does_not_slip_onto_the_shared_port(wide: LiveServer, small_model: Path) -> None:
    port = wide.url.rsplit(":", 1)[1]
    with serving(
        small_model, f"--port={port}", "--api-processes=2", "--log-level=error", wait=False
    ) as second:
        assert second.process.wait(60) == 1
        (line,) = second.log.splitlines()
        assert f"cannot listen on 127.0.0.1:{port}" in line


def test_the_load_of_all_processes_is_reported_once(valkey: EmbeddedValkey, small_model: Path) -> None:
    options = (f"--redis-url={valkey.url}", "--service=ns/llm", "--pod-name=pod-a")
    inside = redis.Redis.from_url(valkey.url, socket_timeout=5)
    with (
        serving(small_model, LONG_CONTEXT, f"--api-processes={PROCESSES}", *options) as server,
        spread(server) as connections,
    ):
        for mine in connections.values():
            begin(mine[0], LONG)

        def told() -> bool:
            reports = inside.hgetall(KEYS.pods)
            assert list(reports) == [b"pod-a"]
            return decode_report(reports[b"pod-a"]).running == PROCESSES

        server.until(told)


def test_a_number_of_processes_that_cannot_be_is_said_in_one_line(small_model: Path) -> None:
    with serving(small_model, LONG_CONTEXT, "--api-processes=0", "--log-level=error", wait=False) as server:
        assert server.process.wait(60) == 1
        (line,) = server.log.splitlines()
        assert "api_processes must lie between 1 and" in line
