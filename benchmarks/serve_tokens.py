"""What `leadline serve` itself spends on a streamed token, beside a core that costs nothing.

    python benchmarks/serve_tokens.py [--streams 256] [--tokens 200] [--rate 20] [--api-processes 1]

The server is the real one, started as a user starts it, with its real core process, wire messages and
sockets; only the core inside that process is a stand-in, which gives every request the next token of an
English text, once a step, `--rate` steps a second. Clients are one asyncio process that reads `--streams`
chat streams at once and checks that every token of each has come and that the text is what was sent.

Between the moment when every stream has begun and the moment when the first one ends:

    API CPU      processor time of the API processes a token: receive, detokenize, encode, write
    core CPU     the same of the core process: build, encode and send the step's message
    ITL          between two chunks of a stream, p50 and p99, as a client sees it

It is processor time, not wall time, so other programs on the machine matter less. 1 s over the API CPU is the
most tokens/s that one API process can stream with a core of its own for each of the three processes;
with --api-processes N it is their sum, and N times as much.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve()
TEXT = (
    "The railway reached the valley in the spring of 1871, and with it came the post, the newspapers and, "
    'twice a week, a doctor. "Nobody here had ever seen a clock that agreed with another," the schoolmaster '
    "wrote; within a year there were four of them, all set by the noon train. Farmers who had carried their "
    "cheese over the pass for centuries now sold it to cafés in the capital, at prices that they thought "
    "were a mistake.\n\nThe line itself was 43.5 km long, climbed 812 m and crossed 19 bridges. "
)


class StandIn:
    """An engine core whose requests all say TEXT, each from another place on, in the real process around it.
    The first step waits until `streams` requests are there."""

    max_model_len = 8192
    num_kv_blocks = 65536

    def __init__(self, token_ids: list[int], seconds: float, streams: int) -> None:
        self._token_ids = token_ids
        self._seconds = seconds
        self._missing = streams
        self._due = 0.0
        self._live: dict[str, list[int]] = {}
        """Request → [tokens given, tokens asked for, where in the text it began]."""
        self._steps = 0

    def add_request(self, request: Any) -> None:
        start = len(self._live) * 7 % len(self._token_ids)
        self._live[request.request_id] = [0, request.sampling.max_tokens, start]
        self._missing -= 1

    def abort(self, request_id: str) -> None:
        self._live.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._live) and self._missing <= 0

    def step(self) -> list[Any]:
        from leadline.engine.messages import CoreOutput

        now = time.monotonic()
        if now < self._due:
            time.sleep(self._due - now)
        self._due = max(self._due, now - self._seconds) + self._seconds
        self._steps += 1
        ids, outputs, ended = self._token_ids, [], []
        for request_id, live in self._live.items():
            done, wanted, start = live
            live[0] = done = done + 1
            output = CoreOutput(request_id=request_id, new_token_ids=[ids[(start + done - 1) % len(ids)]])
            if done == 1:
                output.queue_seconds = 0.0
            if done >= wanted:
                output.finish_reason = "length"
                ended.append(request_id)
            outputs.append(output)
        for request_id in ended:
            del self._live[request_id]
        return outputs

    def stats(self) -> Any:
        from leadline.engine.core.stats import SchedulerStats

        running = len(self._live)
        zeros = dict.fromkeys(SchedulerStats.__dataclass_fields__, 0)
        return SchedulerStats(
            **{  # type: ignore[arg-type]
                **zeros,
                "running": running,
                "waiting_by_class": {},
                "blocks_total": self.num_kv_blocks,
                "steps_total": self._steps,
            }
        )

    def reset_prefix_cache(self) -> int:
        return 0

    def speeds(self) -> Any:
        from leadline.engine.core.stats import Speeds

        return Speeds(0.0, 0.0)

    def listen(self, listener: Any) -> None:
        """It caches nothing."""


def build(config: Any, report: Callable[[Any], None]) -> StandIn:
    """The factory that the core process calls."""
    from leadline.engine import wire
    from leadline.protocol.text.tokenizer import Tokenizer

    report(wire.Resolved(config.model, "smollm2", "1"))
    token_ids = Tokenizer.load(config.model).encode(TEXT, add_special_tokens=False)
    return StandIn(
        token_ids, 1.0 / float(os.environ["SERVE_TOKENS_RATE"]), int(os.environ["SERVE_TOKENS_STREAMS"])
    )


def server(model: str, port: int, processes: int) -> None:
    """The first API process: `leadline serve`, with the core's factory changed."""
    from leadline.engine.config import EngineConfig
    from leadline.engine.server import ServerSettings, serve

    if os.environ.get("SERVE_TOKENS_PROFILE"):
        import cProfile

        profile = cProfile.Profile()
        try:
            profile.runcall(
                serve, EngineConfig(model=model), ServerSettings(port=port), factory="serve_tokens:build"
            )
        finally:
            profile.dump_stats(os.environ["SERVE_TOKENS_PROFILE"])
        return
    serve(
        EngineConfig(model=model),
        ServerSettings(port=port, log_level="warning", api_processes=processes),
        factory="serve_tokens:build",
    )


class Reader(asyncio.Protocol):
    """One chat stream: asks, notes when chunks come, keeps what came."""

    def __init__(self, tokens: int, began: Callable[[], None], ended: Callable[[], None]) -> None:
        self._tokens = tokens
        self._began, self._ended = began, ended
        self.times: list[float] = []
        self.counts: list[int] = []
        """When chunks came, and how many events each held."""
        self.parts: list[bytes] = []
        self._done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        body = json.dumps(
            {
                "model": "smollm2",
                "messages": [{"role": "user", "content": "Tell me of the railway."}],
                "max_tokens": self._tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        transport.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if not self.times and b'"content":"' not in data:
            self.parts.append(data)
            return  # the status line
        self.times.append(time.perf_counter())
        self.counts.append(data.count(b"data: "))
        self.parts.append(data)
        if len(self.times) == 1:
            self._began()
        if data.endswith(b"0\r\n\r\n"):
            self.end()

    def connection_lost(self, error: Exception | None) -> None:
        self.end()

    def end(self) -> None:
        if not self._done:
            self._done = True
            self._ended()

    def text(self) -> str:
        """What the stream said. Raises where it is not the answer that was asked for."""
        raw = b"".join(self.parts)
        body = raw.split(b"\r\n\r\n", 1)[1]
        whole = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            length = int(size, 16)
            whole, body = whole + body[:length], body[length + 2 :]
        events = whole.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""], raw[-500:]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        assert chunks[-1]["usage"]["completion_tokens"] == self._tokens, chunks[-1]
        return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


async def read_all(port: int, streams: int, tokens: int, processes: list[psutil.Process]) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    all_began, one_ended, all_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    count = {"began": 0, "ended": 0}

    def began() -> None:
        count["began"] += 1
        if count["began"] == streams:
            all_began.set()

    def ended() -> None:
        count["ended"] += 1
        one_ended.set()
        if count["ended"] == streams:
            all_ended.set()

    def cpu() -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in processes]

    readers = []
    for _ in range(streams):
        reader = Reader(tokens, began, ended)
        await loop.create_connection(lambda reader=reader: reader, "127.0.0.1", port)  # type: ignore[misc]
        readers.append(reader)
    await asyncio.wait_for(all_began.wait(), 120)
    at, first = time.perf_counter(), cpu()
    await asyncio.wait_for(one_ended.wait(), 600)
    until, last = time.perf_counter(), cpu()
    await asyncio.wait_for(all_ended.wait(), 120)
    gaps, seen, tokens_seen = [], 0, 0
    for reader in readers:
        times = [moment for moment in reader.times if at <= moment <= until]
        tokens_seen += sum(
            count for moment, count in zip(reader.times, reader.counts, strict=True) if at <= moment <= until
        )
        seen += len(times)
        gaps += [b - a for a, b in pairwise(times)]
    return {
        "chunks": seen,
        "tokens": tokens_seen,
        "seconds": until - at,
        "cpu": [b - a for a, b in zip(first, last, strict=True)],
        "gaps": sorted(gaps),
        "texts": [reader.text() for reader in readers],
    }


def measure(model: str, streams: int, tokens: int, rate: float, processes: int) -> dict[str, float]:
    from leadline.protocol.text.tokenizer import Tokenizer

    os.environ["SERVE_TOKENS_RATE"], os.environ["SERVE_TOKENS_STREAMS"] = str(rate), str(streams)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    port = 18391
    process = multiprocessing.get_context("spawn").Process(target=server, args=(model, port, processes))
    process.start()
    try:
        api = psutil.Process(process.pid)
        wait_until_ready(port)
        (core,) = (child for child in api.children() if "leadline.engine.process" in child.cmdline())
        workers = [child for child in api.children() if "leadline.engine.server.worker" in child.cmdline()]
        assert len(workers) == processes - 1, workers
        found = asyncio.run(read_all(port, streams, tokens, [core, api, *workers]))
    finally:
        process.terminate()
        process.join(30)
    whole = Tokenizer.load(model)
    ids = whole.encode(TEXT, add_special_tokens=False)
    said = {whole.decode([ids[(start + i) % len(ids)] for i in range(tokens)]) for start in range(len(ids))}
    assert all(text in said for text in found["texts"]), found["texts"][0]
    given = found["tokens"]
    return {
        "api": sum(found["cpu"][1:]) / given * 1e6,
        "busiest": max(found["cpu"][1:]) / sum(found["cpu"][1:]),
        "core": found["cpu"][0] / given * 1e6,
        "tokens_per_second": given / found["seconds"],
        "chunks_per_token": found["chunks"] / given,
        "p50": statistics.median(found["gaps"]) * 1e3,
        "p99": found["gaps"][int(0.99 * len(found["gaps"]))] * 1e3,
    }


def wait_until_ready(port: int) -> None:
    import httpx

    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise TimeoutError("the server did not become ready within 60 s")


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU of `leadline serve` a streamed token.")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rate", type=float, default=20.0, help="steps a second")
    parser.add_argument("--api-processes", type=int, default=1)
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    from leadline.engine.hub import resolve_model

    model = str(resolve_model("smollm2", progress=False).path)
    row = measure(model, args.streams, args.tokens, args.rate, args.api_processes)
    print(json.dumps({key: round(value, 3) for key, value in row.items()}), f"load {os.getloadavg()[0]:.1f}")
    if not args.no_record:
        from record import record

        several = "" if args.api_processes == 1 else f"{args.api_processes} API processes, "
        what = f"serve, {several}{args.streams} chat streams, {args.rate:g} steps/s"
        record(f"{what}: CPU of the API process{'es' * bool(several)}", row["api"], "us/token")
        record(f"{what}: CPU of the core's messages", row["core"], "us/token")
        record(f"{what}: ITL p50", row["p50"], "ms")
        record(f"{what}: ITL p99", row["p99"], "ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
