"""`leadline gateway` as a process: workers, signals, logs, traces."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import psutil
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
    ok,
    pods,
    sse,
    until,
)

from leadline.gateway.config.settings import ServerConfig


class Process:
    """One `leadline gateway`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: asyncio.subprocess.Process
        self.url = ""

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def workers(self) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # zombies included
                if "resource_tracker" not in " ".join(child.cmdline()):
                    found.append(child)
        return found


def gateway_process(
    folder: Path, address: str, *options: str, before: Callable[[], None] | None = None
) -> contextlib.AbstractAsyncContextManager[Process]:
    """For one pod. `before`: runs in the process before it begins."""
    return _gateway(folder, "--served-name=m", f"--pod={address}", *options, before=before)


def gateway_from(folder: Path, file: Path, *options: str) -> contextlib.AbstractAsyncContextManager[Process]:
    """With a settings file."""
    return _gateway(folder, f"--config={file}", *options)


@contextlib.asynccontextmanager
async def _gateway(
    folder: Path, *options: str, before: Callable[[], None] | None = None
) -> AsyncIterator[Process]:
    one = Process(folder)
    command = ["-m", "leadline.cli.main", "gateway", "--host=127.0.0.1", "--port=0"]
    with (folder / "out").open("wb") as out, (folder / "log").open("wb") as log:
        one.process = await asyncio.create_subprocess_exec(
            *(sys.executable, *command, *options),
            stdout=out,
            stderr=log,
            preexec_fn=before,
        )
    try:
        await until(lambda: re.search(r" at http://\S+\n", one.out) or one.process.returncode is not None, 60)
        found = re.search(r" at (http://\S+)\n", one.out)
        assert found, one.log
        one.url = found[1]
        yield one
    finally:
        if one.process.returncode is None:
            one.process.terminate()
            await asyncio.wait_for(one.process.wait(), 30)


async def test_a_stream_is_finished_after_sigterm_and_nothing_new_is_taken(tmp_path: Path) -> None:
    more = asyncio.Event()

    async def script(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(sse("one")))
        await more.wait()
        writer.write(chunked(sse("[DONE]")) + b"0\r\n\r\n")

    async with pods(script) as (pod,), gateway_process(tmp_path, pod.address) as gateway:
        async with (
            httpx.AsyncClient(timeout=30) as client,
            client.stream("POST", f"{gateway.url}/v1/chat/completions", json=STREAM) as got,
        ):
            pieces = got.aiter_bytes()
            assert await anext(pieces) == sse("one")
            gateway.process.terminate()
            host, port = gateway.url.removeprefix("http://").split(":")

            def closed() -> bool:
                with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
                    return False
                return True

            await until(closed)
            more.set()
            assert b"".join([piece async for piece in pieces]) == sse("[DONE]")
        assert await asyncio.wait_for(gateway.process.wait(), 20) == 0


async def test_workers_share_the_port_and_their_counters(tmp_path: Path) -> None:
    async with pods(ok) as (pod,), gateway_process(tmp_path, pod.address, "--workers=2") as gateway:
        workers = gateway.workers()
        assert len(workers) == 2
        for _ in range(40):
            async with httpx.AsyncClient() as client:  # a connection of its own
                got = await client.post(f"{gateway.url}/v1/chat/completions", json=CHAT)
                assert got.status_code == 200

        async def counted() -> float:
            async with httpx.AsyncClient() as client:
                text = (await client.get(f"{gateway.url}/metrics")).text
            found = re.search(r'requests_total\{code="200",service="default/default"\} (\S+)', text)
            return float(found[1]) if found else 0

        async def all_counted() -> None:
            """The worker that is not asked hands over what it counted a moment later (FLUSH_SECONDS)."""
            ends = time.monotonic() + 10
            while await counted() != 40:
                assert time.monotonic() < ends, f"{await counted()} requests are counted"
                await asyncio.sleep(0.02)

        await all_counted()
        # A worker that dies is replaced, and what it counted is not forgotten.
        workers[0].kill()
        await until(lambda: len(gateway.workers()) == 2 and workers[0] not in gateway.workers(), 20)
        await until(lambda: "starting another" in gateway.log)
        await all_counted()
        gateway.process.terminate()
        assert await asyncio.wait_for(gateway.process.wait(), 20) == 0
        await until(lambda: not any(worker.is_running() for worker in workers))


async def test_a_low_limit_of_open_files_is_raised(tmp_path: Path) -> None:
    """1,024 is usual, and a request takes two: from 500 at once on, all failed."""

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    async def together(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        if request.method == "POST":
            await until(lambda: len(pod.completions) == 60, 30)
        await ok(pod, request, writer)

    async with (
        pods(together) as (pod,),
        gateway_process(tmp_path, pod.address, before=lower) as gateway,
        httpx.AsyncClient(timeout=60) as client,
    ):
        asked = [client.post(f"{gateway.url}/v1/chat/completions", json=CHAT) for _ in range(60)]
        assert {got.status_code for got in await asyncio.gather(*asked)} == {200}


async def test_a_gateway_of_every_address_names_an_ipv4_client_as_ever(tmp_path: Path) -> None:
    """The chart's gateway listens on `::`, for clusters of either family, where peers are ::ffff:10.0.0.7."""
    async with pods(ok) as (pod,), gateway_process(tmp_path, pod.address, "--host=::") as gateway:
        port = gateway.url.rpartition(":")[2]
        async with httpx.AsyncClient() as client:
            got = await client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=CHAT)
        assert got.status_code == 200
        assert pod.completions[0].one("x-forwarded-for") == "127.0.0.1"


async def test_a_port_in_use_is_reported_at_once(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "leadline.cli.main", "gateway", "--host=127.0.0.1"),
            *(f"--port={taken.getsockname()[1]}", "--pod=127.0.0.1:1"),
            stderr=asyncio.subprocess.PIPE,
        )
        _, error = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert "cannot listen on 127.0.0.1" in error.decode()


async def test_the_access_log_tells_everything_but_the_prompt(tmp_path: Path) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "my secret"}]}
    async with pods(ok) as (pod,), gateway_process(tmp_path, pod.address) as gateway:
        async with httpx.AsyncClient() as client:
            url = f"{gateway.url}/v1/chat/completions"
            await client.post(
                url, json=body, headers={"Authorization": "Bearer sk-hidden", "X-Request-ID": "mine-1"}
            )
            failed = await client.post(url, content=b"{")
        await until(lambda: gateway.out.count('"status"') == 2)
        lines = [json.loads(line) for line in gateway.out.splitlines() if line.startswith("{")]
        assert [line["status"] for line in lines] == [200, 400]
        first = lines[0]
        assert first["pod"] == pod.address
        assert first["service"] == "default/default"
        assert first["prompt_tokens"] == 5
        assert first["completion_tokens"] == 2
        assert [line["request_id"] for line in lines] == ["mine-1", failed.headers["x-request-id"]]
        for text in (gateway.out, gateway.log):
            assert "secret" not in text
            assert "hidden" not in text


async def test_spans_are_sent_and_the_trace_is_passed_on() -> None:
    """A collector on a real port gets OTLP over HTTP."""
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

    async def collect(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"", headers="Content-Type: application/x-protobuf"))

    async with pods(ok, collect) as (pod, collector):
        server = ServerConfig(otlp_endpoint=f"http://{collector.address}")
        async with gateway_to(pod.address, config={"server": server}) as rig:
            got = await rig.post(headers={"traceparent": f"00-{trace}-{parent}-01"})
            assert got.content == completion()
        sent = pod.completions[0].one("traceparent")
        assert sent is not None
        assert sent.split("-")[1] == trace
        assert sent.split("-")[2] != parent
        await until(lambda: collector.completions)
        exported = collector.completions[0]
        assert exported.path == "/v1/traces"
        assert bytes.fromhex(trace) in exported.body
        assert b"leadline.pod" in exported.body
        assert b"hello" not in exported.body


async def test_a_collector_that_does_not_answer_delays_the_end_by_no_more_than_a_second() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and answers none
        config = ServerConfig(otlp_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        async with pods(ok) as (pod,):
            async with gateway_to(pod.address, config={"server": config}) as rig:
                await rig.post()
                began = time.monotonic()
            assert time.monotonic() - began < 5  # the exporter's own timeout is ten


async def test_a_worker_leaves_when_its_parent_was_killed(tmp_path: Path) -> None:
    async with pods(ok) as (pod,), gateway_process(tmp_path, pod.address, "--workers=2") as gateway:
        workers = gateway.workers()
        gateway.process.send_signal(signal.SIGKILL)  # one worker may still be starting
        await until(lambda: not any(worker.is_running() for worker in workers), 20)


@pytest.mark.parametrize("workers", [1, 2])
async def test_metrics_have_a_port_of_their_own_and_the_api_does_not_know_them(
    tmp_path: Path, workers: int
) -> None:
    options = (f"--workers={workers}", "--metrics-port=0")
    async with (
        pods(ok) as (pod,),
        gateway_process(tmp_path, pod.address, *options) as gateway,
        httpx.AsyncClient() as client,
    ):
        await client.post(f"{gateway.url}/v1/chat/completions", json=CHAT)
        found = re.search(r"metrics on port (\d+)", gateway.log)
        assert found
        separate = f"{gateway.url.rpartition(':')[0]}:{found[1]}"

        async def counted() -> str:
            got = await client.get(f"{separate}/metrics")
            assert got.headers["content-type"].startswith("text/plain")
            return got.text

        ends = time.monotonic() + 10
        while 'leadline_gateway_requests_total{code="200"' not in await counted():
            assert time.monotonic() < ends, "the worker that counted hands over within a second"
            await asyncio.sleep(0.05)
        assert (await client.get(f"{separate}/v1/models")).status_code == 404
        got = await client.get(f"{gateway.url}/metrics")
        assert got.status_code == 404
        assert got.json()["error"]["type"] == "not_found_error"
        assert (await client.get(f"{gateway.url}/health")).status_code == 200


async def test_a_metrics_port_that_is_taken_is_reported_at_the_start(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AssertionError, match=f"cannot listen on .*{port}"):
            async with gateway_process(tmp_path, "127.0.0.1:1", f"--metrics-port={port}"):
                pass


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_settings_file_that_turns_bad_leaves_the_gateway_running_and_shows(
    tmp_path: Path, workers: int
) -> None:
    async with pods(ok) as (pod,):
        file = tmp_path / "gateway.yaml"
        good = f"services: [{{name: default/m, served_names: [m], pods: ['{pod.address}']}}]\n"
        file.write_text(good)
        async with (
            gateway_from(tmp_path, file, f"--workers={workers}") as gateway,
            httpx.AsyncClient() as client,
        ):

            async def shows(value: str) -> None:
                ends = time.monotonic() + 20
                while (
                    f"leadline_gateway_settings_valid {value}"
                    not in (await client.get(f"{gateway.url}/metrics")).text
                ):
                    assert time.monotonic() < ends
                    await asyncio.sleep(0.05)

            await shows("1.0")
            file.write_text(good + "polcy: random\n")
            await shows("0.0")
            assert "polcy" in gateway.log
            got = await client.post(f"{gateway.url}/v1/chat/completions", json=CHAT)
            assert got.status_code == 200
            file.write_text(good)
            await shows("1.0")
