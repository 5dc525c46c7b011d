"""What `leadline serve` itself spends on a streamed token, beside a core that costs nothing.

    python benchmarks/serve_tokens.py [--streams 256] [--tokens 200] [--rate 20] [--api-processes 1]
    python benchmarks/serve_tokens.py --apis chat responses messages --rounds 3 --gateway

The server is the real one, started as a user starts it, with its real core process, wire messages and
sockets; only the core inside that process is a stand-in, which gives every request the next token of an
English text, once a step, `--rate` steps a second. Clients are one asyncio process that reads `--streams`
streams of one API at once and checks that every token of each has come and that the text is what was sent.

Between the moment when every stream has begun and the moment when the first one ends:

    API CPU      processor time of the API processes a token: receive, detokenize, encode, write
    core CPU     the same of the core process: build, encode and send the step's message
    gateway CPU  the same of the gateway, with --gateway: it stands between, and its streams can move between
                 two pods, which here are the same server by two addresses
    ITL          between two chunks of a stream, p50 and p99, as a client sees it

With several --apis, each of the --rounds measures them one after the other, the medians count, and the others
are compared with the first. It is processor time, not wall time, so other programs on the machine matter
less. 1 s over the API CPU is the most tokens/s that one API process can stream with a core of its own for
each of the three processes; with --api-processes N it is their sum, and N times as much.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve()
PORT = 18391
TEXT = (
    "The railway reached the valley in the spring of 1871, and with it came the post, the newspapers and, "
    'twice a week, a doctor. "Nobody here had ever seen a clock that agreed with another," the schoolmaster '
    "wrote; within a year there were four of them, all set by the noon train. Farmers who had carried their "
    "cheese over the pass for centuries now sold it to cafés in the capital, at prices that they thought "
    "were a mistake.\n\nThe line itself was 43.5 km long, climbed 812 m and crossed 19 bridges. "
)


class StandIn:
    """An engine core whose requests all say TEXT, each from another place on, in the real process around it.
    The first step waits until `streams` requests are there, again each time that all have ended."""

    max_model_len = 8192
    num_kv_blocks = 65536

    def __init__(self, token_ids: list[int], seconds: float, streams: int) -> None:
        self._token_ids = token_ids
        self._seconds = seconds
        self._streams = self._missing = streams
        self._due = 0.0
        self._live: dict[str, list[int]] = {}
        """Request → [tokens given, tokens asked for, where in the text it began]."""
        self._steps = 0

    def add_request(self, request: Any) -> None:
        if not self._live:
            self._missing = self._streams
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

    def rest(self) -> None:
        """It holds nothing that idle time could free."""

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


@dataclass(frozen=True)
class Api:
    """How one API streams."""

    path: str
    body: dict[str, Any]
    """What is asked, but for the model, the question and the number of tokens."""
    limit: str
    """The field for the number of tokens."""
    first: bytes
    """What the first event with text contains."""
    text: Callable[[dict[str, Any]], str]
    """The text of an event."""
    tokens: Callable[[dict[str, Any]], int | None]
    """The number of output tokens, in the event that tells it."""

    def request(self, tokens: int) -> bytes:
        body = json.dumps({"model": "smollm2", "stream": True, self.limit: tokens, **self.body}).encode()
        head = f"POST {self.path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n".encode()
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


QUESTION = [{"role": "user", "content": "Tell me of the railway."}]
APIS = {
    "chat": Api(
        "/v1/chat/completions",
        {"messages": QUESTION, "stream_options": {"include_usage": True}},
        "max_tokens",
        b'"content":"',
        lambda event: "".join(choice["delta"].get("content", "") for choice in event["choices"]),
        lambda event: event["usage"] and event["usage"]["completion_tokens"],
    ),
    "responses": Api(
        "/v1/responses",
        {"input": QUESTION},
        "max_output_tokens",
        b"event: response.output_text.delta",
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
        lambda event: ((event.get("response") or {}).get("usage") or {}).get("output_tokens"),
    ),
    "messages": Api(
        "/v1/messages",
        {"messages": QUESTION},
        "max_tokens",
        b"event: content_block_delta",
        lambda event: event["delta"]["text"] if event["type"] == "content_block_delta" else "",
        lambda event: event["usage"]["output_tokens"] if event["type"] == "message_delta" else None,
    ),
}


class Reader(asyncio.Protocol):
    """One stream: asks, notes when chunks come, keeps what came."""

    def __init__(self, api: Api, tokens: int, began: Callable[[], None], ended: Callable[[], None]) -> None:
        self._api, self._tokens = api, tokens
        self._began, self._ended = began, ended
        self.times: list[float] = []
        self.counts: list[int] = []
        """When chunks came, and how many events each held."""
        self.parts: list[bytes] = []
        self._done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._api.request(self._tokens))  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)
        if not self.times and self._api.first not in data:
            return  # the status line, and what opens a stream
        self.times.append(time.perf_counter())
        self.counts.append(data.count(b"data: "))
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
        """The stream's text. Raises where it is not the answer that was asked for."""
        raw = b"".join(self.parts)
        body = raw.split(b"\r\n\r\n", 1)[1]
        whole = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            length = int(size, 16)
            whole, body = whole + body[:length], body[length + 2 :]
        lines = [line for line in whole.decode().split("\n") if line.startswith("data: {")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        counts = [count for event in events if (count := self._api.tokens(event)) is not None]
        assert counts[-1:] == [self._tokens], raw[-500:]
        return "".join(self._api.text(event) for event in events)


async def read_all(
    api: Api, port: int, streams: int, tokens: int, processes: list[psutil.Process]
) -> dict[str, Any]:
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
        reader = Reader(api, tokens, began, ended)
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


@contextlib.contextmanager
def serving(model: str, streams: int, rate: float, processes: int) -> Iterator[list[psutil.Process]]:
    """The server at PORT: its core, and its API processes."""
    os.environ["SERVE_TOKENS_RATE"], os.environ["SERVE_TOKENS_STREAMS"] = str(rate), str(streams)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    process = multiprocessing.get_context("spawn").Process(target=server, args=(model, PORT, processes))
    process.start()
    try:
        api = psutil.Process(process.pid)
        wait_until_ready(PORT)
        (core,) = (
            child for child in api.children() if "leadline.engine.core_process.main" in child.cmdline()
        )
        workers = [
            child for child in api.children() if "leadline.engine.server.process.worker" in child.cmdline()
        ]
        assert len(workers) == processes - 1, workers
        yield [core, api, *workers]
    finally:
        process.terminate()
        process.join(30)


@contextlib.contextmanager
def gateway() -> Iterator[psutil.Process]:
    """The gateway at PORT + 1, in front of the server."""
    command = [sys.executable, "-m", "leadline.cli.main", "gateway", "--host=127.0.0.1", f"--port={PORT + 1}"]
    command += ["--served-name=smollm2", "--log-level=warning"]
    command += [f"--pod=127.0.0.1:{PORT}", f"--pod=localhost:{PORT}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # its access log
    try:
        wait_until_ready(PORT + 1)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


def measure(
    api: Api,
    model: str,
    streams: int,
    tokens: int,
    engine: list[psutil.Process],
    router: psutil.Process | None,
) -> dict[str, float]:
    from leadline.protocol.text.tokenizer import Tokenizer

    port, processes = (PORT, engine) if router is None else (PORT + 1, [*engine, router])
    found = asyncio.run(read_all(api, port, streams, tokens, processes))
    whole = Tokenizer.load(model)
    ids = whole.encode(TEXT, add_special_tokens=False)
    said = {whole.decode([ids[(start + i) % len(ids)] for i in range(tokens)]) for start in range(len(ids))}
    assert all(text in said for text in found["texts"]), found["texts"][0]
    given = found["tokens"]
    own = found["cpu"][1 : len(engine)]
    return {
        "api": sum(own) / given * 1e6,
        "busiest": max(own) / sum(own),
        "core": found["cpu"][0] / given * 1e6,
        **({} if router is None else {"gateway": found["cpu"][-1] / given * 1e6}),
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


UNITS = {
    "api": ("CPU of the API process", "us/token"),
    "core": ("CPU of the core's messages", "us/token"),
    "gateway": ("CPU of the gateway", "us/token"),
    "p50": ("ITL p50", "ms"),
    "p99": ("ITL p99", "ms"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU of `leadline serve` a streamed token.")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rate", type=float, default=20.0, help="steps a second")
    parser.add_argument("--api-processes", type=int, default=1)
    parser.add_argument("--apis", nargs="+", choices=sorted(APIS), default=["chat"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--gateway", action="store_true", help="put the gateway in between")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    from leadline.engine.hub import resolve_model

    model = str(resolve_model("smollm2", progress=False).path)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in args.apis}
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(serving(model, args.streams, args.rate, args.api_processes))
        router = stack.enter_context(gateway()) if args.gateway else None
        for _ in range(args.rounds):
            for name in args.apis:
                row = measure(APIS[name], model, args.streams, args.tokens, engine, router)
                rows[name].append(row)
                shown = json.dumps({key: round(value, 3) for key, value in row.items()})
                print(f"{name}: {shown} load {os.getloadavg()[0]:.1f}")
    medians = {
        name: {key: statistics.median(row[key] for row in found) for key in found[0]}
        for name, found in rows.items()
    }
    first = args.apis[0]
    for name in args.apis[1:]:
        for key in ("api", "gateway"):
            if key in medians[name]:
                print(f"{name} / {first}, {UNITS[key][0]}: {medians[name][key] / medians[first][key]:.3f}")
    if not args.no_record:
        from record import record

        several = "" if args.api_processes == 1 else f"{args.api_processes} API processes, "
        behind = ", gateway" if args.gateway else ""
        for name, row in medians.items():
            what = f"serve, {several}{args.streams} {name} streams{behind}, {args.rate:g} steps/s"
            for key, (title, unit) in UNITS.items():
                if key in row:
                    plural = "es" * bool(several and key == "api")
                    record(f"{what}: {title}{plural}", row[key], unit)
                    if name != first and unit == "us/token":
                        record(f"{what}: {title} over {first}'s", row[key] / medians[first][key], "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
