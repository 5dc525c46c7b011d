"""`leadline up` as a child process of a test, and the reports about its parts in its log."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

SMALL = (
    *("--block-size=16", "--max-model-len=1024", "--cpu-threads=1"),
    *(f"--cpu-kv-bytes={96 << 20}", "--drain-timeout=20"),
)


def until(condition: Callable[[], object], seconds: float = 60.0, what: str = "it") -> Any:
    """Wait for a condition and return what it gave."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {seconds} s")
        time.sleep(0.02)
    return found


class Up:
    """Start, `wait_ready`, talk to `url`, `end`."""

    def __init__(self, folder: Path, *arguments: str, model: str = "smollm2") -> None:
        self._out, self._log = folder / "out", folder / "log"
        with self._out.open("wb") as out, self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "leadline.cli.main", "up", model, "--port=0", *SMALL, *arguments],
                stdout=out,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def url(self) -> str:
        match = re.search(r" at (http://\S+)", self._out.read_text())
        return match[1] if match else ""

    def wait_ready(self) -> Up:
        until(lambda: self.url or self.process.poll() is not None, 150, "a start")
        assert self.process.poll() is None, self.log
        return self

    def lives(self, part: str) -> list[tuple[int, str]]:
        """(pid, address) of each run of engine-N, gateway or valkey, in order."""
        found = re.findall(rf"^{part}\b.*\(pid (\d+), (\S+)\)$", self.log, re.MULTILINE)
        return [(int(pid), address) for pid, address in found]

    def pid(self, part: str) -> int:
        return self.lives(part)[-1][0]

    def processes(self) -> list[psutil.Process]:
        """Itself and all that came of it."""
        top = psutil.Process(self.process.pid)
        return [top, *top.children(recursive=True)]

    def end(self, number: signal.Signals = signal.SIGTERM, seconds: float = 60.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            self.process.kill()
            self.process.wait()

    # Requests

    def ask(self, messages: list[dict[str, str]], *, url: str = "", **fields: object) -> Asked:
        """A greedy chat answer, whole, with its explanation."""
        body = {"model": "smollm2", "messages": messages, "max_tokens": 4, "temperature": 0, **fields}
        with httpx.Client(base_url=url or self.url, timeout=120) as client:
            return Asked(client.post("/v1/chat/completions", json=body, headers={"X-Leadline-Explain": "1"}))


class Asked:
    """An answer and why it came from where it did."""

    def __init__(self, response: httpx.Response) -> None:
        assert response.status_code == 200, response.text
        self.pod = response.headers.get("x-leadline-pod", "")
        body = response.json()
        self.text: str = body["choices"][0]["message"]["content"]
        self.prompt_tokens: int = body["usage"]["prompt_tokens"]
        self.cached_tokens: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.why = json.loads(response.headers.get("x-leadline-explain", "{}"))

    @property
    def exact(self) -> bool:
        return bool(self.why["exact"])

    def matched(self) -> dict[str, int]:
        """Pod → tokens that the gateway believed it to hold, of the pods that could be picked."""
        return {row["pod"]: row["matched_tokens"] for row in self.why["pods"]}


def left(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those still there. (psutil tells a process from a later one of the same number.)"""
    return [
        process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


def says(word: str, length: int = 250) -> list[dict[str, str]]:
    """A conversation's first turn that shares one block with those of other words, the template's."""
    return [{"role": "user", "content": f"{word} " * length + "Why?"}]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
