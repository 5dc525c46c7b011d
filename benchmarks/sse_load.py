"""Many streamed requests at once, from several processes, by a client that is cheaper than any server.

Each stream has a keep-alive connection of its own (HTTP/1.1), asks once to warm it, and once when the start
is given. Nothing of a stream is parsed but its status line and its last events, which hold the usage; of the
rest only the moments of arrival are kept. `Load.busy` says how much of a core the busiest process used: a
figure near 1 means that the client was what was measured.

    parent ──bodies──▶ worker: connect, warm up ──"ready"──▶ parent ──start──▶ workers ──Streams──▶ parent
"""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import time
from array import array
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Load", "Stream", "run_load"]

_TAIL = 2048
_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
_USAGE = re.compile(rb'"prompt_tokens":(\d+),"completion_tokens":(\d+)')
_PATIENCE = 900.0


@dataclass(slots=True)
class Stream:
    """One measured request. Moments are seconds of time.monotonic(), one clock for the machine."""

    asked: float = 0.0
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    """Of pieces that held events; a piece may hold several."""
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class Load:
    streams: list[Stream]
    busy: float
    """Share of a core of the busiest client process, from the start to the last stream's end."""

    @property
    def seconds(self) -> float:
        """From the first request to the last token."""
        return max(s.arrivals[-1] for s in self.streams) - min(s.asked for s in self.streams)


class _Connection(asyncio.Protocol):
    """One keep-alive connection with at most one stream on it."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._stream = Stream()
        self._tail = b""
        self._done: asyncio.Future[Stream] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    async def ask(self, request: bytes) -> Stream:
        """Raises RuntimeError for anything but a whole stream."""
        self._stream, self._tail = Stream(), b""
        self._done = asyncio.get_running_loop().create_future()
        self._stream.asked = time.monotonic()
        self._transport.write(request)
        return await asyncio.wait_for(self._done, _PATIENCE)

    def data_received(self, data: bytes) -> None:
        now, arrivals = time.monotonic(), self._stream.arrivals
        if arrivals or b"data: " in data:
            arrivals.append(now)
        elif not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self._fail(data)
        self._tail = data if len(data) >= _TAIL else (self._tail + data)[-_TAIL:]
        if self._tail.endswith(b"\r\n0\r\n\r\n"):
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(b"connection lost: " + repr(error).encode())

    def _end(self) -> None:
        usage = _USAGE.findall(self._tail)
        if not usage or not self._tail.endswith(_END):
            self._fail(self._tail)
        elif self._done is not None and not self._done.done():
            self._stream.prompt_tokens, self._stream.output_tokens = map(int, usage[-1])
            self._done.set_result(self._stream)

    def _fail(self, why: bytes) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(RuntimeError(f"a stream failed: {why[-600:].decode(errors='replace')}"))


def _request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def _work(pipe: Connection, port: int, path: str, warm: bytes, bodies: list[bytes]) -> None:
    loop = asyncio.get_running_loop()
    connections = [(await loop.create_connection(_Connection, "127.0.0.1", port))[1] for _ in bodies]
    await asyncio.gather(*(connection.ask(_request(path, warm)) for connection in connections))
    requests = [_request(path, body) for body in bodies]
    pipe.send("ready")
    start: float = await asyncio.to_thread(pipe.recv)
    await asyncio.sleep(start - time.monotonic())
    began, used = time.monotonic(), time.process_time()
    pairs = zip(connections, requests, strict=True)
    streams = await asyncio.gather(*(connection.ask(request) for connection, request in pairs))
    pipe.send((streams, (time.process_time() - used) / (time.monotonic() - began)))


def _worker(pipe: Connection, *job: Any) -> None:
    import uvloop

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_work(pipe, *job))
    except Exception as error:
        pipe.send(error)


def _receive(pipe: Connection) -> Any:
    answer = pipe.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer


def run_load(port: int, path: str, warm: bytes, bodies: list[bytes], processes: int = 4) -> Load:
    """All of `bodies` at once, over `processes`; `warm` is asked once on every connection before. Raises
    RuntimeError unless every stream ended well."""
    spawn = multiprocessing.get_context("spawn")
    workers = []
    try:
        for index in range(min(processes, len(bodies))):
            here, there = spawn.Pipe()
            job = (there, port, path, warm, bodies[index::processes])
            process = spawn.Process(target=_worker, args=job, daemon=True)
            process.start()
            there.close()
            workers.append((process, here))
        for _, pipe in workers:
            _receive(pipe)
        start = time.monotonic() + 0.2
        for _, pipe in workers:
            pipe.send(start)
        answers = [_receive(pipe) for _, pipe in workers]
    finally:
        for process, _ in workers:
            process.join(5)
            if process.is_alive():
                process.kill()
    return Load([stream for streams, _ in answers for stream in streams], max(busy for _, busy in answers))
