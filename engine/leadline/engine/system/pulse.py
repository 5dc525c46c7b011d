"""Liveness of the engine core: tells a frozen or hung process from one that computes.

    core process    a thread counts in SOCKET_DIR/pulse every 0.2 s, whatever the step loop does; the loop
                    writes the number of the step that it is in, and the seconds that this step may take
    API processes   look every 0.4 s:   the count moves                             it lives
                                        it stands still, and CPU time is used       it lives: something holds
                                                                                    the interpreter's lock
                                        it stands still, the process is stopped     frozen after 2 looks
                                        it stands still, no CPU time is used        frozen after 7 looks
                                        a step lasts longer than it may             hung

The step loop's heartbeat cannot tell: a prefill of ten seconds, or the capture of a CUDA graph, looks like a
process that was stopped. Looks are counted rather than seconds, so an API process that was itself stopped or
starved draws no conclusion from the time that it missed; a look at a step that waits for a processor does not
count. `core_process/step_bounds.py` has the bound of a step. Ranks of tensor parallelism have no count: of
them only a stop by a signal is noticed here.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["LOOK_SECONDS", "Pulse", "PulseWatch", "process_state"]

LOOK_SECONDS = 0.4
_BEAT_SECONDS = 0.2
_STOPPED_LOOKS = 2
_SILENT_LOOKS = 7
_HEAD = struct.Struct("<QI")
"""The count, and how many process ids follow."""
_MOST_RANKS = 256
_STEP = struct.Struct("<Qd")
"""The number, odd inside a step and even between two, and the seconds that the step may take; 0.0: any."""
_STEP_AT = _HEAD.size + 4 * (1 + _MOST_RANKS)
_BYTES = _STEP_AT + _STEP.size
_STARVED_TICKS = 4
"""CPU time between two looks, in ticks of 10 ms, below which a process that could run had no processor."""

ProcessState = Callable[[int], "tuple[str, int] | None"]


class Pulse:
    """The core's end."""

    def __init__(self, directory: str) -> None:
        path = _path(directory)
        path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _BYTES)
        self._count = self._step = 0
        self.name([])

    def start(self) -> None:
        """Count from now on, in a thread that ends with the process."""
        threading.Thread(target=self._run, daemon=True, name="pulse").start()

    def name(self, ranks: Sequence[int]) -> None:
        """Process ids of further ranks, without which the core makes no progress."""
        pids = [os.getpid(), *ranks[:_MOST_RANKS]]
        struct.pack_into(f"<{len(pids)}I", self._page, _HEAD.size, *pids)
        _HEAD.pack_into(self._page, 0, self._count, len(pids))

    def beat(self) -> None:
        self._count += 1
        struct.pack_into("<Q", self._page, 0, self._count)

    def begin_step(self, seconds: float) -> None:
        """A step begins that may take `seconds`; 0.0: any time."""
        self._step += 1 + self._step % 2
        _STEP.pack_into(self._page, _STEP_AT, self._step, seconds)

    def end_step(self) -> None:
        """No step is computed."""
        self._step += self._step % 2
        _STEP.pack_into(self._page, _STEP_AT, self._step, 0.0)

    def _run(self) -> None:
        while True:
            self.beat()
            time.sleep(_BEAT_SECONDS)


class PulseWatch:
    """An API process's end; the core has made the file."""

    def __init__(self, directory: str, process: ProcessState | None = None) -> None:
        """`process`: `process_state`, or what stands in for it in tests."""
        with _path(directory).open("rb") as file:
            self._page = mmap.mmap(file.fileno(), _BYTES, access=mmap.ACCESS_READ)
        self._process = process or process_state
        self._count = self._cpu = -1
        self._silent = self._stopped = self._stopped_ranks = self._in_step = 0
        """Looks in a row."""
        self._step, self._step_cpu = 0, -1

    def look(self) -> str | None:
        """Look once; return why the core counts as frozen or hung, or None. Call it every LOOK_SECONDS."""
        hung = self._hung()
        return self._frozen() or hung

    def _hung(self) -> str | None:
        number, seconds = _STEP.unpack_from(self._page, _STEP_AT)
        if number != self._step or number % 2 == 0 or not seconds:
            self._step, self._step_cpu, self._in_step = number, -1, 0
            return None
        pid = struct.unpack_from("<I", self._page, _HEAD.size)[0]
        if (found := self._process(pid)) is None:
            return None
        state, cpu = found
        starved = state == "R" and cpu - self._step_cpu < _STARVED_TICKS
        self._step_cpu = cpu
        self._in_step += not starved
        if self._in_step * LOOK_SECONDS < seconds:
            return None
        return (
            f"the engine core (process {pid}) hangs: a step has lasted longer than {seconds:.0f} s, "
            "far longer than steps of its size"
        )

    def _frozen(self) -> str | None:
        count, named = _HEAD.unpack_from(self._page)
        pid, *ranks = struct.unpack_from(f"<{named}I", self._page, _HEAD.size)
        stopped = [rank for rank in ranks if (found := self._process(rank)) is not None and found[0] == "T"]
        self._stopped_ranks = self._stopped_ranks + 1 if stopped else 0
        if self._stopped_ranks >= _STOPPED_LOOKS:
            return f"process {stopped[0]} of the engine core is stopped by a signal"
        if count != self._count:
            self._count, self._cpu = count, -1
            self._silent = self._stopped = 0
            return None
        found = self._process(pid)
        if found is None:  # it has ended, which others notice
            return None
        state, cpu = found
        self._silent = self._silent + 1 if cpu == self._cpu else 1
        self._cpu = cpu
        self._stopped = self._stopped + 1 if state in "Tt" else 0
        if self._stopped >= _STOPPED_LOOKS:
            return f"the engine core (process {pid}) is stopped by a signal or a debugger"
        if self._silent >= _SILENT_LOOKS:
            return f"the engine core (process {pid}) shows no sign of life"
        return None


def process_state(pid: int) -> tuple[str, int] | None:
    """The state of a process as in proc(5), T for stopped, and the CPU time it has used; None if it cannot be
    had."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):
        return None


def _path(directory: str) -> Path:
    return Path(directory, "pulse")
