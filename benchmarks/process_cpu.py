"""Processor time of a process tree over time, out of /proc: by process, and of each one's main thread."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

__all__ = ["ProcessorWatch", "Usage"]

_TICK = 1 / os.sysconf("SC_CLK_TCK")


class Usage:
    """What one process used between two moments, in seconds of processor time."""

    def __init__(self, command: str, samples: list[tuple[float, float, float]]) -> None:
        """`samples`: (moment, processor time of the process, of its main thread), in order."""
        begin, end = samples[0], samples[-1]
        self.command = command
        self.seconds = end[1] - begin[1]
        self.share = self.seconds / max(end[0] - begin[0], 1e-9)
        """Of a core, all threads together."""
        steps = range(4, len(samples))
        self.peak = max(
            ((samples[i][2] - samples[i - 4][2]) / (samples[i][0] - samples[i - 4][0]) for i in steps),
            default=(end[2] - begin[2]) / max(end[0] - begin[0], 1e-9),
        )
        """Highest share of a core of the main thread over four samples: near 1 is saturated."""


class ProcessorWatch(threading.Thread):
    """Samples `root` and its descendants of now every `interval` seconds, until the context ends."""

    def __init__(self, root: int, interval: float = 0.25) -> None:
        super().__init__(daemon=True)
        self._interval = interval
        self._over = threading.Event()
        self._samples: dict[int, list[tuple[float, float, float]]] = {pid: [] for pid in _tree(root)}
        self._commands = {pid: _command(pid) for pid in self._samples}

    def __enter__(self) -> ProcessorWatch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while True:
            for pid, samples in self._samples.items():
                folder = Path(f"/proc/{pid}")
                with contextlib.suppress(OSError):
                    times = _seconds(folder / "stat"), _seconds(folder / "task" / str(pid) / "stat")
                    samples.append((time.monotonic(), *times))
            if self._over.wait(self._interval):
                return

    def between(self, begin: float, end: float) -> list[Usage]:
        """Of each process that lived; moments are those of time.monotonic()."""
        found = []
        for pid, samples in self._samples.items():
            inside = [
                sample for sample in samples if begin - self._interval <= sample[0] <= end + self._interval
            ]
            if inside:
                found.append(Usage(self._commands[pid], inside))
        return found


def _tree(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                children.setdefault(int(_fields(folder / "stat")[1]), []).append(int(folder.name))
    found, waiting = [], [root]
    while waiting:
        found.append(waiting.pop())
        waiting += sorted(children.get(found[-1], []))
    return found


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def _fields(stat: Path) -> list[str]:
    """Those behind the name, which may hold anything: state, parent, ... (proc(5))."""
    return stat.read_text(errors="replace").rpartition(")")[2].split()


def _seconds(stat: Path) -> float:
    fields = _fields(stat)
    return (int(fields[11]) + int(fields[12])) * _TICK
