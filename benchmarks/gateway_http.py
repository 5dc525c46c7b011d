"""The gateway's own cost beside two Rust routers, in front of the same two mock engines, in one run.

    python -m venv /tmp/routers && /tmp/routers/bin/pip install vllm-router sglang-router
    apt-get install wrk nginx-light
    python benchmarks/gateway_http.py --routers /tmp/routers [--workers 2] [--rounds 3] [--seconds 5]

The mock engines are two servers of one nginx process that answer every request with the same small chat
completion, so what is measured is the router between. `wrk` asks with a two-message chat, not streamed,
always the same one; with --distinct each request has a question of its own, which a router that works with
tokens must render and tokenize:

    requests/s    64 connections for `--seconds`, the median of `--rounds`; in a round all take turns
    added p50     1 connection; the median over what the mock engine takes without a router
    CPU           processor time of the router's processes a request, at 64 connections: says more than
                  requests/s where other programs share the machine

Then streams (gateway_streams.py): `--streams` clients at once read `--pieces` chunks each from a mock engine
(asyncio, one chunk every 50 ms), all of which must arrive; between two chunks (ITL), p50 and p99. Leadline
runs with its default policy (prefix), with --model FOLDER also with that model's tokenizer; the others with
their cache-aware one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from gateway_streams import BODY, MODELS
from needs import need
from record import record

HERE = Path(__file__).resolve()
ROUTERS: dict[str, list[str]] = {"vllm-router": [], "sglang-router": ["launch"]}
"""Name → its subcommand."""
FIRST_PORT = 18200
ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "The capital of France is Paris."},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 31, "completion_tokens": 8, "total_tokens": 39},
    }
)
NGINX = """
worker_processes 1; pid %(folder)s/nginx.pid; error_log %(folder)s/nginx.log; daemon off;
events { worker_connections 4096; }
http {
  access_log off; keepalive_timeout 600; keepalive_requests 1000000000; default_type application/json;
  client_body_temp_path %(folder)s/body;
  map $uri $answer { default '%(answer)s'; /v1/models '%(models)s'; }
  %(servers)s
}
"""
LUA = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = %s
%s
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("\\nRESULT %%d %%d %%f %%f %%d\\n", summary.requests, summary.duration,
    latency:percentile(50), latency:percentile(99), e.connect + e.read + e.write + e.status + e.timeout))
end
"""

DISTINCT = """
local number = os.time() * 1000000
request = function()
  number = number + 1
  local body = string.gsub(wrk.body, "France", string.format("country %d", number))
  return wrk.format(nil, nil, nil, body)
end
"""


@dataclass
class Target:
    """Something to send requests to."""

    name: str
    url: str
    process: psutil.Process | None = None
    rates: list[float] = field(default_factory=list)
    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    single: list[float] = field(default_factory=list)

    def cpu_seconds(self) -> float:
        if self.process is None:
            return 0.0
        total = 0.0
        for process in [self.process, *self.process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total


@contextlib.contextmanager
def running(command: list[str], log: Path) -> Iterator[psutil.Process]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_answer(url: str, log: Path) -> None:
    """Until a chat is answered with 200."""
    ends = time.monotonic() + 60
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", BODY.encode(), {"Content-Type": "application/json"}
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as got:
                got.read()
                return
        except OSError as error:
            if time.monotonic() > ends:
                raise SystemExit(f"{url} does not answer: {error}\n{log.read_text()[-2000:]}") from None
            time.sleep(0.2)


def wrk(url: str, connections: int, seconds: float, script: Path) -> tuple[int, float, float, float]:
    """(requests, requests/s, p50 ms, p99 ms)."""
    command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "-s", str(script)]
    done = subprocess.run(
        [*command, f"{url}/v1/chat/completions"], capture_output=True, text=True, check=True
    )
    found = re.search(r"RESULT (\d+) (\d+) (\S+) (\S+) (\d+)", done.stdout)
    if found is None:
        raise SystemExit(f"wrk said nothing of use:\n{done.stdout}{done.stderr}")
    requests, micros, p50, p99, errors = (float(value) for value in found.groups())
    if errors:
        raise SystemExit(f"{errors:.0f} of {requests:.0f} requests to {url} failed")
    return int(requests), requests / micros * 1e6, p50 / 1000, p99 / 1000


def measure(targets: list[Target], rounds: int, seconds: float, script: Path) -> None:
    for number in range(rounds):
        for target in targets:
            wrk(target.url, 64, 1, script)  # warm
            before = target.cpu_seconds()
            requests, rate, p50, p99 = wrk(target.url, 64, seconds, script)
            target.cpu.append((target.cpu_seconds() - before) / requests * 1e6)
            target.rates.append(rate)
            target.p50.append(p50)
            target.p99.append(p99)
            target.single.append(wrk(target.url, 1, seconds / 2, script)[2])
        print(f"round {number + 1} of {rounds} done", file=sys.stderr, flush=True)


def commands(
    given: argparse.Namespace, engines: list[str], first_port: int
) -> dict[str, tuple[list[str], str]]:
    """Router → (command, URL)."""
    port = iter(range(first_port, first_port + 20))
    found: dict[str, tuple[list[str], str]] = {}

    def leadline(name: str, workers: int, extra: list[str]) -> None:
        at = next(port)
        command = [sys.executable, "-m", "leadline.cli.main", "gateway", "--host=127.0.0.1", f"--port={at}"]
        command += [f"--workers={workers}", "--served-name=m", "--log-level=warning", *extra]
        command += [f"--pod={engine}" for engine in engines]
        found[name] = (command, f"http://127.0.0.1:{at}")

    leadline("leadline, 1 worker", 1, [])
    if given.workers > 1:
        leadline(f"leadline, {given.workers} workers", given.workers, [])
    if given.model:
        leadline("leadline, exact tokens, 1 worker", 1, ["--model", given.model])
        if given.workers > 1:
            name = f"leadline, exact tokens, {given.workers} workers"
            leadline(name, given.workers, ["--model", given.model])
    if given.routers:
        urls = [f"http://{engine}" for engine in engines]
        for name, start in ROUTERS.items():
            at = next(port)
            command = [f"{given.routers}/bin/{name}", *start, "--worker-urls", *urls]
            # Metrics of both listen on one port by default.
            command += ["--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(at)]
            command += ["--prometheus-port", str(at + 500)]
            found[name] = (command, f"http://127.0.0.1:{at}")
    return found


def start(
    stack: contextlib.ExitStack, routers: dict[str, tuple[list[str], str]], folder: Path
) -> list[Target]:
    targets = []
    for name, (command, url) in routers.items():
        log = folder / (re.sub(r"\W+", "-", name) + ".log")
        process = stack.enter_context(running(command, log))
        wait_for_answer(url, log)
        targets.append(Target(name, url, process))
    return targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--routers", help="virtual environment that has vllm-router and sglang-router")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--pieces", type=int, default=40)
    parser.add_argument("--model", help="model folder: measure with its tokenizer as well")
    parser.add_argument("--distinct", action="store_true", help="no two requests with the same prompt")
    parser.add_argument("--no-record", action="store_true", help="leave benchmarks/results.jsonl alone")
    given = parser.parse_args()
    routers = [f"{given.routers}/bin/{name}" for name in ROUTERS] if given.routers else []
    need(programs=["nginx", "wrk", *routers])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small(given, folder)
        streams(given, folder)


def small(given: argparse.Namespace, folder: Path) -> None:
    script = folder / "chat.lua"
    script.write_text(LUA % (json.dumps(BODY), DISTINCT if given.distinct else ""))
    engines = [f"127.0.0.1:{FIRST_PORT + offset}" for offset in (1, 2)]
    servers = "\n".join(
        f"server {{ listen {engine}; location / {{ return 200 $answer; }} }}" for engine in engines
    )
    config = folder / "nginx.conf"
    config.write_text(NGINX % {"folder": folder, "answer": ANSWER, "models": MODELS, "servers": servers})
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(["nginx", "-c", str(config)], folder / "nginx.out"))
        direct = Target("direct", f"http://{engines[0]}")
        wait_for_answer(direct.url, folder / "nginx.out")
        targets = [direct, *start(stack, commands(given, engines, FIRST_PORT + 10), folder)]
        measure(targets, given.rounds, given.seconds, script)
    base = statistics.median(direct.single)
    peer = next((statistics.median(t.rates) for t in targets if t.name == "vllm-router"), None)
    print(f"load average {os.getloadavg()[0]:.1f}")
    print(f"{'':34}requests/s   p50 ms   p99 ms   added p50 ms at 1   CPU us a request")
    for target in targets:
        rate, added = statistics.median(target.rates), statistics.median(target.single) - base
        p50, p99, cpu = (statistics.median(values) for values in (target.p50, target.p99, target.cpu))
        print(f"{target.name:34}{rate:10,.0f}{p50:9.2f}{p99:9.2f}{added:20.3f}{cpu:19.0f}")
        if given.no_record:
            continue
        engine = target.name.partition(",")[0]
        version = None if engine == "leadline" else "mock engine alone" if engine == "direct" else "PyPI"
        what = "64 connections, distinct prompts" if given.distinct else "64 connections"
        label = f"gateway, {what}{target.name.removeprefix(engine)}"
        ratio = rate / peer if peer and engine == "leadline" else None
        common: dict[str, Any] = {"engine": engine, "engine_version": version}
        record(f"{label}, requests", round(rate), "1/s", peer_ratio=ratio and round(ratio, 3), **common)
        record(f"{label}, CPU a request", round(cpu), "µs", **common)
        record(f"{label}, added p50 at 1 connection", round(added, 3), "ms", **common)


def streams(given: argparse.Namespace, folder: Path) -> None:
    ports = [FIRST_PORT + offset for offset in (3, 4)]
    engines = [f"127.0.0.1:{port}" for port in ports]
    script = str(HERE.with_name("gateway_streams.py"))
    options = [f"--pieces={given.pieces}", f"--streams={given.streams}"]
    print(f"{given.streams} streams at once:")
    with contextlib.ExitStack() as stack:
        for port in ports:
            command = [sys.executable, script, "mock", str(port), *options]
            stack.enter_context(running(command, folder / f"mock-{port}.log"))
        direct = Target("direct", f"http://{engines[0]}")
        wait_for_answer(direct.url, folder / f"mock-{ports[0]}.log")
        targets = [direct, *start(stack, commands(given, engines, FIRST_PORT + 40), folder)]
        for target in targets:
            command = [sys.executable, script, "read", target.url, *options]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            got = json.loads(done.stdout)
            print(
                f"{target.name:34}{got['whole']:4.0f} whole, first chunk p50 {got['first_p50']:6.1f} ms, "
                f"between chunks p50 {got['itl_p50']:6.2f} p99 {got['itl_p99']:6.2f} ms"
            )
            if not given.no_record:
                engine = target.name.partition(",")[0]
                label = f"gateway, {given.streams} streams{target.name.removeprefix(engine)}"
                version = None if engine == "leadline" else "PyPI"
                record(f"{label}, whole", got["whole"], "streams", engine=engine, engine_version=version)
                record(
                    f"{label}, ITL p99", round(got["itl_p99"], 2), "ms", engine=engine, engine_version=version
                )


if __name__ == "__main__":
    main()
