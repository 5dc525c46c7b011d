"""What HTTP serving costs: `leadline serve` under concurrent streams beside `LLM.generate`, in one run.

    PYTHONPATH=protocol:engine:gateway:cli python3 benchmarks/gpu_serve.py --json results.jsonl
    PYTHONPATH=protocol:engine:gateway:cli python3 benchmarks/gpu_serve.py --shape tiny --dtype float32
    --backend torch:64 --mode eager --workloads bs8x16 --client-processes 1

Random weights of a named shape and gpu_models' tokenizer of all its vocabulary: each token is a word to
detokenize. For each workload of gpu_workloads (bs256x512: 256 requests, 128 tokens in, 512 out; A):

1. offline: `LLM.generate` of all of them, in a process of its own that ends and frees the GPU;
2. `leadline serve`, started as a user starts it; all requests at once, streamed over HTTP/1.1, as
   completions (prompts of token ids) and as chat (as many words), temperature 0.6, ignore_eos.

Each runs --repeats times on an empty prefix cache and the best counts, for both alike. A row:

    tok/s        output tokens from the first request to the last token, and its ratio to offline
    TTFT, ITL    as a client sees them; ITL between two pieces of a stream
    API, core    processor time a token, the share of a core, and the main thread's peak share over a second:
                 near 1 it is saturated. With several API processes: their sum, their mean and the highest
    client       share of a core of the busiest client process: near 1 the client is the bottleneck

--server adds options of `leadline serve` and may be repeated: --server='' --server='--api-processes 2'.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_engine import make_llm, measure
from gpu_models import SHAPES, write_model
from gpu_results import result_line
from gpu_workloads import workload
from leadline.protocol.text.tokenizer import Tokenizer
from needs import need
from process_cpu import ProcessorWatch, Usage
from sse_load import Load, run_load

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
NAME = "bench"
BYTES = 256
"""Ids below are single bytes, which need not be text."""


def offline(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """tok/s by workload."""
    llm = make_llm(options, folder, options.backend, options.mode)
    best: dict[str, float] = {}
    for name in options.workloads:
        for _ in range(options.repeats):
            seconds, prompt, output = measure(llm, name, options.requests, options.longest)
            speed = output / seconds
            print(f"offline {name}: {prompt} + {output} tokens in {seconds:.2f} s = {speed:,.0f} tok/s")
            best[name] = max(best.get(name, 0.0), speed)
    llm.close()
    return best


@contextmanager
def server(options: argparse.Namespace, folder: Path, extra: str) -> Iterator[tuple[int, int]]:
    """(process id, port) of a `leadline serve` that is ready."""
    backend, block_size = options.backend.split(":")
    command = [sys.executable, "-m", "leadline.cli.main", "serve", str(folder), "--port", "0"]
    command += ["--served-name", NAME, "--load-format", "dummy", "--dtype", options.dtype]
    command += ["--attention-backend", backend, "--block-size", block_size, "--log-level", "warning"]
    command += ["--max-num-batched-tokens", str(options.max_num_batched_tokens)]
    command += ["--max-model-len", "8192" if options.shape != "tiny" else "4096"]
    command += ["--enforce-eager"] * (options.mode == "eager") + shlex.split(extra)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = next((text for text in process.stdout if text.startswith("Leadline serving")), "")
        if not line:
            raise SystemExit(f"the server did not start: exit code {process.wait()}")
        yield process.pid, int(line.rsplit(":", 1)[1])
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def bodies(options: argparse.Namespace, folder: Path, name: str, kind: str) -> tuple[bytes, list[bytes]]:
    """(a short request to begin with, the workload's)."""
    prompts, lengths = workload(name, options.requests, options.longest)
    tokenizer = Tokenizer.load(folder)

    def body(prompt: list[int], length: int) -> bytes:
        ask: dict[str, Any] = {"prompt": prompt}
        if kind == "chat":
            ask = {
                "messages": [{"role": "user", "content": tokenizer.decode([i for i in prompt if i >= BYTES])}]
            }
        ask |= {"model": NAME, "max_tokens": length, "temperature": 0.6, "ignore_eos": True}
        return json.dumps(ask | {"stream": True, "stream_options": {"include_usage": True}}).encode()

    return body(prompts[0][:16], 4), [body(*pair) for pair in zip(prompts, lengths, strict=True)]


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@dataclass(slots=True)
class Row:
    """One workload, served; times in ms."""

    workload: str
    kind: str
    extra: str
    tokens_per_second: float
    ratio: float
    first: tuple[float, float]
    between: tuple[float, float]
    api: list[Usage]
    core: Usage
    tokens: int
    client: float

    def text(self) -> str:
        api = sum(usage.seconds for usage in self.api) / self.tokens * 1e6
        share, peak = statistics.mean(u.share for u in self.api), max(u.peak for u in self.api)
        label = f"{self.workload} {self.kind} {self.extra}".strip()
        return (
            f"{label}: {self.tokens_per_second:,.0f} tok/s = {self.ratio:.1%} of offline | "
            f"TTFT p50 {self.first[0]:.0f} p90 {self.first[1]:.0f} ms | "
            f"ITL p50 {self.between[0]:.1f} p99 {self.between[1]:.1f} ms | "
            f"API {api:.1f} us/token, {share:.0%} of a core, peak {peak:.0%}"
            f"{' SATURATED' if peak > 0.9 else ''} | "
            f"core {self.core.seconds / self.tokens * 1e6:.1f} us/token, {self.core.share:.0%} | "
            f"client {self.client:.0%}{' BOTTLENECK' if self.client > 0.9 else ''}"
        )

    def lines(self, options: argparse.Namespace, offline_speed: float) -> list[dict[str, Any]]:
        mode = f"{options.mode}, HTTP {self.kind}{' ' if self.extra else ''}{self.extra}"
        api = sum(usage.seconds for usage in self.api) / self.tokens * 1e6

        def line(what: str, value: float, unit: str, **more: Any) -> dict[str, Any]:
            name = f"{self.workload}, offline and over HTTP{what}"
            shape, backend = options.shape, options.backend
            return result_line(name, value, unit, model_shape=shape, attention=backend, mode=mode, **more)

        return [
            line("", self.tokens_per_second, "output tok/s", peer=offline_speed),
            line(": TTFT p50", self.first[0], "ms"),
            line(": TTFT p90", self.first[1], "ms"),
            line(": ITL p50", self.between[0], "ms"),
            line(": ITL p99", self.between[1], "ms"),
            line(": processor time of the API", api, "us/token"),
            line(": busiest API process", 100 * max(usage.share for usage in self.api), "% of a core"),
            line(": core process", 100 * self.core.share, "% of a core"),
        ]


def served(options: argparse.Namespace, folder: Path, extra: str, speeds: dict[str, float]) -> Iterator[Row]:
    with server(options, folder, extra) as (pid, port):
        for name in options.workloads:
            for kind in options.kinds:
                yield max(
                    (
                        one_run(options, folder, extra, pid, port, name, kind, speeds[name])
                        for _ in range(options.repeats)
                    ),
                    key=lambda row: row.tokens_per_second,
                )


def one_run(
    options: argparse.Namespace,
    folder: Path,
    extra: str,
    pid: int,
    port: int,
    name: str,
    kind: str,
    offline_speed: float,
) -> Row:
    reset = f"http://127.0.0.1:{port}/admin/reset_prefix_cache"
    urllib.request.urlopen(urllib.request.Request(reset, method="POST"), timeout=60).close()
    warm, asked = bodies(options, folder, name, kind)
    with ProcessorWatch(pid) as watch:
        load = run_load(port, PATHS[kind], warm, asked, options.client_processes)
    lengths = workload(name, options.requests, options.longest)[1]
    tokens = sum(stream.output_tokens for stream in load.streams)
    if tokens != sum(lengths):
        raise SystemExit(f"{name}: asked for {sum(lengths)} output tokens, got {tokens}")
    row = row_of(name, kind, extra, load, watch, offline_speed)
    print(row.text(), flush=True)
    return row


def row_of(name: str, kind: str, extra: str, load: Load, watch: ProcessorWatch, offline_speed: float) -> Row:
    streams = load.streams
    first = [(stream.arrivals[0] - stream.asked) * 1e3 for stream in streams]
    gaps = [
        (after - before) * 1e3
        for stream in streams
        for before, after in zip(stream.arrivals, stream.arrivals[1:], strict=False)
    ]
    usages = watch.between(
        min(stream.asked for stream in streams), max(stream.arrivals[-1] for stream in streams)
    )
    cores = [usage for usage in usages if "leadline.engine.core_process.main" in usage.command]
    others = [usage for usage in usages if usage not in cores and "leadline" in usage.command]
    tokens = sum(stream.output_tokens for stream in streams)
    speed = tokens / load.seconds
    return Row(
        name,
        kind,
        extra,
        speed,
        speed / offline_speed,
        (quantile(first, 0.5), quantile(first, 0.9)),
        (quantile(gaps, 0.5), quantile(gaps, 0.99)),
        others,
        cores[0],
        tokens,
        load.busy,
    )


def offline_line(options: argparse.Namespace, name: str, speed: float) -> dict[str, Any]:
    return result_line(
        f"{name}, offline and over HTTP",
        speed,
        "output tok/s",
        model_shape=options.shape,
        attention=options.backend,
        mode=options.mode,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", default="triton:64")
    parser.add_argument("--mode", choices=("graph", "eager"), default="graph")
    parser.add_argument("--workloads", type=names, default=["bs256x512", "A"])
    parser.add_argument("--kinds", type=names, default=list(PATHS))
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--client-processes", type=int, default=4)
    parser.add_argument("--server", action="append", metavar="OPTIONS", help="more options of leadline serve")
    parser.add_argument("--json", help="append one JSON line a measurement here")
    options = parser.parse_args()
    need(gpus=1)
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_model(Path(temporary), SHAPES[options.shape], options.dtype)
        # A process of its own, which frees the GPU by ending.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            speeds = pool.submit(offline, options, folder).result()
        rows = [row for extra in options.server or [""] for row in served(options, folder, extra, speeds)]
    # Last: naming the GPU makes a context on it.
    for name in options.workloads:
        lines.append(offline_line(options, name, speeds[name]))
        lines += [line for row in rows if row.workload == name for line in row.lines(options, speeds[name])]
    if options.json:
        with open(options.json, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    print("\nbest of each:")
    print("\n".join(row.text() for row in rows))


if __name__ == "__main__":
    main()
