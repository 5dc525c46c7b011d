"""Well-behaved streams beside hostile clients: what the streams notice, and what is left behind.

    python benchmarks/hostile_mix.py [--seconds 300] [--streams 16] [--tokens 48] [--kinds KIND ...] [--check]

Starts an engine with the demo model and a gateway in front. First the well-behaved streams run alone for
half of `--seconds` (a minute at most), then beside the hostile clients for all of it: schemas and patterns
that are huge or impossible, clients that read nothing, requests that never arrive whole, clients that leave
in mid-stream, prompts of the whole context and bodies above the limit. Prints one JSON object: the gap
between two tokens of a stream (p50, p95 and p99, in milliseconds) alone and disturbed, the ratio, the
memory of engine and gateway before, at its peak and after, how often the engine took its core for frozen,
and what is still in use at the end. With `--check` the exit code is 1 if a stream was not complete and
right, if the core was taken for frozen, or if requests, KV blocks or much memory are left.

The hostile clients are a process of their own at the lowest priority: in life they sit on other machines, and
must not take the time in which the gaps are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

_KV_BYTES = 512 << 20
_KV_BYTES_A_TOKEN = 2 * 30 * 3 * 64 * 4
"""Of the demo model in float32: keys and values, layers, heads, size of a head."""
_IDLE_GRAMMARS_SECONDS = 35
"""After that long the engine has given back the memory of grammars without requests."""
_ENGINE = ["--max-model-len=1024", f"--cpu-kv-bytes={_KV_BYTES}", "--cpu-threads=2", "--write-timeout=5"]


@contextlib.contextmanager
def server(log: Path, *arguments: str) -> Iterator[tuple[str, psutil.Process]]:
    """A `leadline` command that prints where it listens, and its process. Its log goes to `log`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        with out.open("wb") as file, log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "leadline.cli.main", *arguments], stdout=file, stderr=errors
            )
        try:
            while not (found := re.search(r" at (http://\S+)\n", out.read_text())):
                if process.poll() is not None:
                    raise SystemExit(f"leadline {arguments[0]} left with {process.returncode}")
                time.sleep(0.05)
            yield found[1], psutil.Process(process.pid)
        finally:
            process.terminate()
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()


def memory(process: psutil.Process) -> int:
    """Bytes of a process and its children. A page that several of them share counts once."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            text = Path(f"/proc/{one.pid}/smaps_rollup").read_text()
            total += 1024 * sum(int(size) for size in re.findall(r"^Pss: +(\d+) kB", text, re.MULTILINE))
    return total


class Streams:
    """The well-behaved clients."""

    def __init__(self, url: str, count: int, tokens: int) -> None:
        self._url, self._count, self._tokens = url, count, tokens
        self._right: dict[int, str] = {}
        self.gaps: list[float] = []
        self.streams = self.broken = self.wrong = 0

    async def run(self, seconds: float) -> None:
        """Each sends its prompt again and again; every stream that has begun is read to its end."""
        self.gaps, self.streams, self.broken, self.wrong = [], 0, 0, 0
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as client:
            ends = time.monotonic() + seconds
            await asyncio.gather(*(self._one(client, number, ends) for number in range(self._count)))

    async def _one(self, client: httpx.AsyncClient, number: int, ends: float) -> None:
        body = {
            "model": "smollm2",
            "prompt": f"Story number {number}. Once upon a time",
            "max_tokens": self._tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "priority_class": "interactive",
        }
        while time.monotonic() < ends:
            text, last, done, reason = "", 0.0, False, None
            with contextlib.suppress(httpx.HTTPError):
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        done = done or line == "data: [DONE]"
                        if not line.startswith("data: {") or '"choices"' not in line:
                            continue
                        now = time.monotonic()
                        if last:
                            self.gaps.append(now - last)
                        last = now
                        (choice,) = json.loads(line[6:])["choices"]
                        text, reason = text + choice["text"], choice["finish_reason"]
            self.streams += 1
            self.broken += not (done and reason == "length")
            self.wrong += done and text != self._right.setdefault(number, text)

    def report(self) -> dict[str, Any]:
        marks = statistics.quantiles(self.gaps, n=100)
        return {
            "streams": self.streams,
            "not_complete": self.broken,
            "wrong": self.wrong,
            "gap_p50_ms": round(marks[49] * 1000, 1),
            "gap_p95_ms": round(marks[94] * 1000, 1),
            "gap_p99_ms": round(marks[98] * 1000, 1),
        }


KINDS = ["monster", "never_reads", "half_request", "leaver", "huge"]


class Hostile:
    """The others. Each is a coroutine that attacks once; `run` keeps two of each of KINDS going."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)
        self._random = random.Random(1)
        self.attacks: dict[str, int] = {}

    async def run(self, kinds: list[str]) -> None:
        """Attack until SIGTERM; then print how often each kind did."""
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        tasks = [asyncio.create_task(self._again(getattr(self, kind))) for kind in kinds for _ in range(2)]
        await stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        print(json.dumps(self.attacks))

    async def _again(self, attack: Callable[[], Awaitable[None]]) -> None:
        while True:
            name = getattr(attack, "__name__", "attack")
            self.attacks[name] = self.attacks.get(name, 0) + 1
            with contextlib.suppress(OSError, TimeoutError):
                await attack()
            await asyncio.sleep(0.2)

    async def monster(self) -> None:
        """Structured output that is expensive or impossible to compile."""
        properties = {f"p{i}": {"type": "string"} for i in range(self._random.choice([50, 700, 4000]))}
        body: dict[str, Any] = self._random.choice(
            [
                {"response_format": _schema({"type": "object", "properties": properties})},
                {"response_format": _schema({"$ref": "#"})},
                {"regex": r"(\w{1,300} ?){1,300}"},
                {"regex": "".join(self._random.choices("abcdefgh", k=100_000))},
                {"grammar": 'start: start "a"'},
            ]
        )
        async with self._connected() as (reader, writer):
            writer.write(_post({"prompt": "Data:", "max_tokens": 8, **body}))
            async with asyncio.timeout(30):
                await reader.read()

    async def never_reads(self) -> None:
        async with self._connected(buffer=4096) as (_, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            body = {"prompt": "A", "max_tokens": 200, "n": 2, "temperature": 1, "stream": True, "logprobs": 5}
            writer.write(_post({**body, "ignore_eos": True, "priority_class": "batch"}))
            await asyncio.sleep(20)

    async def half_request(self) -> None:
        whole = _post({"prompt": "half", "max_tokens": 1})
        async with self._connected() as (_, writer):
            writer.write(whole[: self._random.randrange(10, len(whole))])
            await asyncio.sleep(self._random.uniform(0, 5))

    async def leaver(self) -> None:
        async with self._connected() as (reader, writer):
            body = {"prompt": "Count: one two", "max_tokens": 300, "ignore_eos": True, "stream": True}
            writer.write(_post({**body, "priority_class": "batch"}))
            async with asyncio.timeout(20):
                await reader.read(self._random.randrange(1, 3000))

    async def huge(self) -> None:
        """A prompt of nearly the whole context, or a body above the limit."""
        words = "word " * self._random.choice([900, 900, 8_000_000])
        async with self._connected() as (reader, writer):
            writer.write(
                _post(
                    {"prompt": f"{self._random.random()} {words}", "max_tokens": 4, "priority_class": "batch"}
                )
            )
            async with asyncio.timeout(30):
                await reader.read()

    @contextlib.asynccontextmanager
    async def _connected(
        self, buffer: int = 0
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        client = socket.socket()
        if buffer:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, (self._host, self._port))
        reader, writer = await asyncio.open_connection(sock=client)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def _post(body: dict[str, Any]) -> bytes:
    data = json.dumps({"model": "smollm2", **body}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    return head % len(data) + data


class Usage:
    """What engine and gateway hold."""

    def __init__(self, engine: str, gateway: str) -> None:
        self._engine, self._gateway = engine, gateway

    async def now(self) -> dict[str, float]:
        async with httpx.AsyncClient(timeout=30) as client:
            engine = (await client.get(f"{self._engine}/metrics")).text
            gateway = (await client.get(f"{self._gateway}/metrics")).text
        return {
            "running": _sum(engine, "leadline_engine_running_requests"),
            "waiting": _sum(engine, "leadline_engine_waiting_requests"),
            "kv_blocks_used": _sum(engine, "leadline_engine_kv_blocks_used"),
            "gateway_in_flight": _sum(gateway, "leadline_gateway_in_flight_requests"),
        }

    async def settled(self, seconds: float) -> dict[str, float]:
        """As soon as nothing is in use, or what is in use after `seconds`."""
        ends = time.monotonic() + seconds
        while any((held := await self.now()).values()) and time.monotonic() < ends:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        return held


def _sum(page: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE))


async def touch(url: str) -> None:
    """Use what an engine takes into use once and keeps: all KV blocks, and the process that grammars start
    from. So memory that grows afterwards is not theirs."""
    tokens = _KV_BYTES // _KV_BYTES_A_TOKEN
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        body = {"model": "smollm2", "max_tokens": 1}
        for number in range(tokens // 900 + 2):
            await client.post("/v1/completions", json={**body, "prompt": f"{number} " + "word " * 900})
        await client.post("/v1/completions", json={**body, "prompt": "Yes or no?", "regex": "yes|no"})


async def measure(
    seconds: float,
    streams: int,
    tokens: int,
    kinds: list[str],
    engine: tuple[str, psutil.Process],
    gateway: tuple[str, psutil.Process],
) -> dict[str, Any]:
    processes = {"engine": engine[1], "gateway": gateway[1]}
    good, usage = Streams(gateway[0], streams, tokens), Usage(engine[0], gateway[0])
    await touch(gateway[0])
    await good.run(min(seconds / 2, 60))
    alone = good.report()
    before = {name: memory(process) for name, process in processes.items()}
    peak = dict(before)

    async def watch() -> None:
        while True:
            for name, process in processes.items():
                peak[name] = max(peak[name], memory(process))
            await asyncio.sleep(2)

    watching = asyncio.create_task(watch())
    hostile = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--attack", gateway[0], "--kinds", *kinds), stdout=subprocess.PIPE
    )
    try:
        await good.run(seconds)
        disturbed = good.report()
    finally:
        hostile.terminate()
        attacks, _ = await hostile.communicate()
    held = await usage.settled(60)
    await asyncio.sleep(_IDLE_GRAMMARS_SECONDS)
    watching.cancel()
    after = {name: memory(process) for name, process in processes.items()}
    return {
        "alone": alone,
        "disturbed": disturbed,
        "p99_ratio": round(disturbed["gap_p99_ms"] / alone["gap_p99_ms"], 2),
        "attacks": json.loads(attacks),
        "memory_mib": {
            name: [round(part[name] / 2**20) for part in (before, peak, after)] for name in processes
        },
        "still_in_use": held,
    }


def failures(report: dict[str, Any]) -> list[str]:
    """What `--check` does not accept."""
    found = [
        f"{phase}: {report[phase][what]} streams {what}"
        for phase in ("alone", "disturbed")
        for what in ("not_complete", "wrong")
        if report[phase][what]
    ]
    found += [f"{name} is {value:g} at the end" for name, value in report["still_in_use"].items() if value]
    if report["taken_for_frozen"]:
        found.append(f"the core was taken for frozen {report['taken_for_frozen']} times")
    for name, (before, _, after) in report["memory_mib"].items():
        if after > before + 512:
            found.append(f"{name} grew from {before} to {after} MiB")
    return found


@contextlib.contextmanager
def gateway_before(log: Path, engine: str) -> Iterator[tuple[str, psutil.Process]]:
    """A gateway whose clients may read nothing for five seconds, not for a minute."""
    pods = [{"address": urlsplit(engine).netloc}]
    service = {"name": "default/smollm2", "served_names": ["smollm2"], "pods": pods}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"server": {"write_timeout_seconds": 5}, "services": [service]}, file)
        file.flush()
        with server(log, "gateway", "--host=127.0.0.1", "--port=0", f"--config={file.name}") as found:
            yield found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48, help="of each stream")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--attack", metavar="URL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.attack:
        os.nice(19)
        asyncio.run(Hostile(args.attack).run(args.kinds))
        return 0
    with (
        tempfile.TemporaryDirectory() as folder,
        server(log := Path(folder, "engine"), "serve", "smollm2", "--port=0", *_ENGINE) as engine,
        gateway_before(Path(folder, "gateway"), engine[0]) as gateway,
    ):
        report = asyncio.run(measure(args.seconds, args.streams, args.tokens, args.kinds, engine, gateway))
        report["taken_for_frozen"] = log.read_text().count("the server is not ready until it goes on")
    print(json.dumps(report, indent=2))
    found = failures(report) if args.check else []
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
