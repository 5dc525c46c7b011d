"""Runs `leadline serve` as users do, and waits for what tests want to see.

The engine computes with one thread: two that spin are far slower as soon as another process wants a core."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

BLOCK = 16
CONTEXT = 512
WARM_PROMPT = (
    "You are the assistant of a railway company and answer questions about trains, tickets and stations."
)
"""In the prefix cache of `narrow_server` before it takes requests."""
ODD_NAMES = ["Qwen/Qwen3-8B.Instruct", "x" * 200, "模型-É.v2:latest"]
"""Aliases of `narrow_server` (P17)."""
LONG_CONTEXT = "--max-model-len=8192"
"""For the small model, whose streams have to be long to last."""
BASE_OPTIONS = [
    "--port=0",
    f"--block-size={BLOCK}",
    f"--max-model-len={CONTEXT}",
    f"--cpu-kv-bytes={256 << 20}",
    "--cpu-threads=1",
]


class LiveServer:
    """One server process. `log` is what it wrote to standard error so far."""

    def __init__(self, process: subprocess.Popen[bytes], log_file: Path, out_file: Path) -> None:
        self.process = process
        self._log_file = log_file
        self._out_file = out_file
        self.url = ""

    @property
    def log(self) -> str:
        return self._log_file.read_text(errors="replace")

    @property
    def model(self) -> str:
        return str(self.http.get("/v1/models").json()["data"][0]["id"])

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120)

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=120, max_retries=0)

    @property
    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=120, max_retries=0)

    def post(self, path: str, **body: Any) -> httpx.Response:
        with self.http as http:
            return http.post(path, json=body)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the series of that name whose labels include those given."""
        with self.http as http:
            text = http.get("/metrics").text
        total = 0.0
        for line in text.splitlines():
            match = re.fullmatch(rf"leadline_engine_{name}(?:\{{(.*)\}})? (\S+)", line)
            if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
                total += float(match[2])
        return total

    def core(self) -> psutil.Process:
        (core,) = self._children("leadline.engine.core_process.main")
        return core

    def workers(self) -> list[psutil.Process]:
        """The API processes beside the first one."""
        return self._children("leadline.engine.server.process.worker")

    def _children(self, module: str) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if module in child.cmdline():
                    found.append(child)
        return found

    def until(self, condition: Callable[[], object], seconds: float = 20.0) -> float:
        """Wait for a condition; returns how long it took."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > seconds:
                raise AssertionError(f"did not happen within {seconds} s\n{self.log}")
            time.sleep(0.02)
        return time.monotonic() - began

    def wait_ready(self) -> None:
        def announced() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"the server left with {self.process.returncode}:\n{self.log}")
            match = re.search(r" at (http://\S+)", self._out_file.read_text())
            self.url = match[1] if match else ""
            return match is not None

        self.until(announced, 120)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        return self.process.returncode


@contextlib.contextmanager
def serving(model: str | Path, *options: str, wait: bool = True) -> Iterator[LiveServer]:
    """A server of `model` with BASE_OPTIONS and `options`, which override them; `wait`: until it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        log_file, out_file = Path(folder, "log"), Path(folder, "out")
        with log_file.open("wb") as log, out_file.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "leadline.cli.main", "serve", str(model), *BASE_OPTIONS, *options],
                stdout=out,
                stderr=log,
            )
        server = LiveServer(process, log_file, out_file)
        try:
            if wait:
                server.wait_ready()
            yield server
        finally:
            server.stop()
