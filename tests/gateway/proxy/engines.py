"""Real engines for the gateway's tests: `leadline serve smollm2` as users run it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

BLOCK = 16
OPTIONS = [
    f"--block-size={BLOCK}",
    "--max-model-len=1024",
    f"--cpu-kv-bytes={192 << 20}",
    "--cpu-threads=1",
    "--dtype=float32",
    "--served-name=m",
]


@dataclass
class Engine:
    """One `leadline serve`. `start` may be called again after it died: same port."""

    folder: Path
    options: list[str] = field(default_factory=list)
    port: int = 0
    model: str = "smollm2"
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def start(self) -> None:
        out = self.folder / "out"
        with out.open("wb") as stdout, (self.folder / "log").open("wb") as stderr:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "leadline.cli.main", "serve", self.model),
                    f"--port={self.port}",
                    *OPTIONS,
                    *self.options,
                ],
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def wait_ready(self, seconds: float = 180) -> None:
        assert self.process is not None
        ends = time.monotonic() + seconds
        while True:
            found = re.search(r" at http://127\.0\.0\.1:(\d+)", (self.folder / "out").read_text())
            if found:
                self.port = int(found[1])
                return
            if self.process.poll() is not None or time.monotonic() > ends:
                raise AssertionError(f"the engine did not start:\n{(self.folder / 'log').read_text()}")
            time.sleep(0.05)

    def signal(self, number: int, part: str = "engine") -> None:
        """To all of the engine's processes at once, as when a container is killed or frozen; or to its
        `server` or its `core` alone."""
        assert self.process is not None
        if part == "engine":
            os.killpg(self.process.pid, number)
            return
        pid = self.process.pid
        if part == "core":
            (pid,) = (
                child.pid
                for child in psutil.Process(pid).children(recursive=True)
                if "leadline.engine.core_process.main" in child.cmdline()
            )
        os.kill(pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(20)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
                self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()


@contextlib.contextmanager
def engines(count: int, *options: str, model: str = "smollm2") -> Iterator[list[Engine]]:
    """So many engines, started together."""
    with tempfile.TemporaryDirectory() as folder:
        running = []
        try:
            for number in range(count):
                place = Path(folder, str(number))
                place.mkdir()
                engine = Engine(place, list(options), model=model)
                engine.start()
                running.append(engine)
            for engine in running:
                engine.wait_ready()
            yield running
        finally:
            for engine in running:
                engine.stop()
