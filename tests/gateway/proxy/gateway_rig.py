"""A whole gateway on a real port in this event loop, and scripted pods on real sockets behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import uvicorn

from leadline.gateway.app import Gateway, proxy_settings
from leadline.gateway.config.settings import GatewayConfig, PodConfig, ServiceConfig
from leadline.gateway.pods import Pod
from leadline.protocol.http.server_protocol import ServerProtocol

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
STREAM = {**CHAT, "stream": True}


@dataclass
class Received:
    """A request as a pod got it."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]

    def one(self, name: str) -> str | None:
        values = self.all(name)
        assert len(values) < 2, f"{name} came {len(values)} times"
        return values[0] if values else None


Script = Callable[["ScriptedPod", Received, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class ScriptedPod:
    """An HTTP server whose behaviour is a script, for faults that no real engine shows on demand."""

    script: Script
    received: list[Received] = field(default_factory=list)
    connections: int = 0
    dropped: int = 0
    """Connections that the other side closed while the script was at work."""
    address: str = ""
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self, port: int = 0) -> ScriptedPod:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def stop(self) -> None:
        """As a killed process: the port is closed and all connections are reset."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    @property
    def completions(self) -> list[Received]:
        return [one for one in self.received if one.method == "POST"]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode("latin-1").split("\r\n")
                method, path, _ = lines[0].split(" ", 2)
                headers = [tuple(line.split(": ", 1)) for line in lines[1:] if line]
                length = next((int(v) for k, v in headers if k.lower() == "content-length"), 0)
                request = Received(method, path, headers, await reader.readexactly(length))  # type: ignore[arg-type]
                self.received.append(request)
                at_work = asyncio.ensure_future(self.script(self, request, writer))
                gone = asyncio.ensure_future(reader.read(1))
                await asyncio.wait({at_work, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not at_work.done():
                    self.dropped += 1
                    at_work.cancel()
                    return
                try:
                    at_work.result()
                except ConnectionError:
                    self.dropped += 1
                    raise
                finally:
                    gone.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    if await gone == b"":
                        return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


def answer(body: bytes, *, status: int = 200, headers: str = "Content-Type: application/json") -> bytes:
    return b"HTTP/1.1 %d X\r\n%s\r\nContent-Length: %d\r\n\r\n" % (status, headers.encode(), len(body)) + body


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def sse(payload: object) -> bytes:
    text = payload if isinstance(payload, str) else json.dumps(payload, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


def completion(text: str = "Hi.", prompt_tokens: int = 5, cached: int = 0) -> bytes:
    return json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            ],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": 2,
                "total_tokens": prompt_tokens + 2,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }
    ).encode()


async def ok(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
    """A pod that answers."""
    if request.method == "GET":
        writer.write(answer(b"{}"))
    elif request.json.get("stream"):
        writer.write(STREAM_HEAD)
        for word in ("Hel", "lo"):
            writer.write(chunked(sse({"choices": [{"index": 0, "delta": {"content": word}}]})))
        writer.write(chunked(sse("[DONE]")) + b"0\r\n\r\n")
    else:
        writer.write(answer(completion()))


def status(code: int, headers: str = "") -> Script:
    """A pod that answers everything with a status."""

    async def script(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        lines = "Content-Type: application/json" + ("\r\n" + headers if headers else "")
        writer.write(answer(b'{"error":{"message":"no %d"}}' % code, status=code, headers=lines))

    return script


VERSION = b'{"version":"1","resumes_streams":true}'


def movable(script: Script) -> Script:
    """A pod that says it is an engine of ours."""

    async def whole(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        if request.method == "GET":
            writer.write(answer(VERSION))
        else:
            await script(pod, request, writer)

    return whole


async def hang(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
    """A pod that takes requests and answers none, not even /health."""
    await asyncio.Event().wait()


async def busy(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
    """A healthy pod that never ends its answer."""
    if request.method == "GET":
        writer.write(answer(b"{}"))
        return
    await asyncio.Event().wait()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # pytest keeps its own


@dataclass
class Rig:
    """A running gateway. `pods` are those of its only service, default/m."""

    gateway: Gateway
    url: str
    server: _Server

    @property
    def pods(self) -> dict[str, Pod]:
        service = self.gateway.table.get("default/m")
        assert service is not None
        return service.pods

    def client(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=30, **options)

    async def post(
        self, body: Any = None, path: str = "/v1/chat/completions", **options: Any
    ) -> httpx.Response:
        async with self.client() as client:
            if isinstance(body, bytes):
                return await client.post(path, content=body, **options)
            return await client.post(path, json=CHAT if body is None else body, **options)

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of the series of that name whose labels include those given."""
        async with self.client() as client:
            text = (await client.get("/metrics")).text
        total = 0.0
        for line in text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == f"leadline_gateway_{name}" and all(
                f'{key}="{wanted}"' in series for key, wanted in labels.items()
            ):
                total += float(value)
        return total

    def assert_counts_are_zero(self) -> None:
        """Nothing is counted as being in flight (P16)."""
        service = self.gateway.table.get("default/m")
        assert service is not None
        for pod in service.pods.values():
            assert pod.in_flight == 0
            assert pod.in_flight_prefill_tokens == 0
            assert pod._unseen == {}
        assert self.gateway.in_flight == 0
        assert self.gateway.admission.pending(service) == 0
        assert self.gateway.admission.waiting(service) == 0

    async def settled(self) -> None:
        """Wait until no request is in flight, then check all counts."""
        await until(lambda: self.gateway.in_flight == 0)
        self.assert_counts_are_zero()


async def until(condition: Callable[[], object], seconds: float = 10.0) -> float:
    """Wait for a condition; returns how long it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise AssertionError(f"did not happen within {seconds} s")
        await asyncio.sleep(0.005)
    return time.monotonic() - began


@contextlib.asynccontextmanager
async def gateway_to(
    *addresses: str,
    config: dict[str, Any] | None = None,
    service: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """A gateway whose service default/m, served as m, has pods at these addresses. `settings` are fields of
    ProxySettings."""
    entry = ServiceConfig(
        name="default/m",
        served_names=["m"],
        tokenizer="approximate",
        pods=[PodConfig(address=address, id=f"pod-{i}") for i, address in enumerate(addresses)],
    )
    for name, value in (service or {}).items():
        setattr(entry, name, value)
    whole = GatewayConfig(services=[entry], **(config or {})).validate()
    quick = {"access_log": False, "breaker_seconds": 0.2, "migration": "off"}
    gateway = Gateway(whole, replace(proxy_settings(whole), **{**quick, **settings}))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    options = uvicorn.Config(
        gateway,
        http=ServerProtocol,
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=5,
    )
    server = _Server(options)
    task = asyncio.ensure_future(server.serve([listener]))
    try:
        await until(lambda: server.started or task.done())
        yield Rig(gateway, f"http://127.0.0.1:{listener.getsockname()[1]}", server)
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def pods(*scripts: Script) -> AsyncIterator[list[ScriptedPod]]:
    running = [await ScriptedPod(script).start() for script in scripts]
    try:
        yield running
    finally:
        for pod in running:
            await pod.stop()
