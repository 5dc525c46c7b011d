"""A torch profiler trace of a running engine core, for so many steps or seconds.

The directory is configured (`profile_dir`); names are ours, so that no caller decides what is written where.
A trace that waits for steps ends after MAX_SECONDS in any case: an idle engine makes none. Starting the
profiler and writing the file hold the loop up, the former by seconds the first time on a GPU.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from leadline.engine.profiling.phases import Phases, Sink, profiler_sink

if TYPE_CHECKING:
    import torch

__all__ = ["MAX_SECONDS", "MAX_STEPS", "TraceRecorder", "TraceResult"]

MAX_SECONDS = 60.0
MAX_STEPS = 1000


@dataclass(slots=True, frozen=True)
class TraceResult:
    path: str
    steps: int
    """Steps in the trace."""
    seconds: float


class TraceRecorder:
    """One trace, from its construction to `finish`. All calls come from the thread that runs the steps."""

    def __init__(
        self, directory: str, phases: Phases, *, steps: int | None = None, seconds: float | None = None
    ) -> None:
        """Record `steps` steps, or for `seconds`. Raises OSError if `directory` cannot be written."""
        import torch

        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
        self._folder = folder
        self._phases = phases
        self._steps_left = MAX_STEPS if steps is None else steps
        self._seconds = MAX_SECONDS if seconds is None else seconds
        self._steps = 0
        kinds = torch.profiler.ProfilerActivity
        activities = [kinds.CPU] + ([kinds.CUDA] if torch.cuda.is_available() else [])
        self._profiler: torch.profiler.profile = torch.profiler.profile(activities=activities)
        self._profiler.start()
        self._before: Sink | None = phases.sink
        phases.sink = profiler_sink()
        self._began = time.monotonic()

    def step_done(self) -> None:
        self._steps += 1
        self._steps_left -= 1

    @property
    def done(self) -> bool:
        """It has what it was asked for: call `finish`."""
        return self._steps_left <= 0 or time.monotonic() - self._began >= self._seconds

    def finish(self) -> TraceResult:
        """Stop, and write the file (gzipped JSON for Perfetto or chrome://tracing). Raises OSError."""
        seconds = time.monotonic() - self._began
        self._phases.sink = self._before
        self._profiler.stop()
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        path = self._folder / f"leadline-{stamp}-{os.getpid()}-{time.monotonic_ns() % 1_000_000:06d}.json.gz"
        self._profiler.export_chrome_trace(str(path))
        if not path.is_file():
            raise OSError(f"the profiler wrote nothing to {path}")
        return TraceResult(str(path), self._steps, seconds)
