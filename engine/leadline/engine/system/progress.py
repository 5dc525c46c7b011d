"""The progress of long work: stages of a start, the share of bytes done in them, and how people see it.

The code that does the work calls a `ReportStage`. The core's process turns the calls into `wire.Progress`,
and the server into its answers to `/health` and `/ready`. People see a bar on a terminal, and elsewhere a
line every ten seconds. Pure Python, no torch.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["LINE_SECONDS", "ByteMeter", "LinePace", "ReportStage", "no_report", "progress_bar"]

LINE_SECONDS = 10.0
"""Between two lines about one stage."""

ReportStage = Callable[[str, float | None, str], None]
"""(stage, share done in [0, 1] or None where no end is known, detail). Must be quick. Called from one thread
at a time, not always the same."""

_EVERY_SECONDS = 0.5
_STEP = 0.01


def no_report(stage: str, fraction: float | None, detail: str) -> None:
    """Report to no one."""


class ByteMeter:
    """Bytes done of bytes in all → reports of one stage.

    Reports the beginning, the end, and in between whatever is a percent or half a second further than the
    last report. Shares never fall. Safe for threads; its reports never overlap.
    """

    def __init__(self, stage: str, total: int, report: ReportStage) -> None:
        """`total` 0: not known; then reports have a detail and no share."""
        self._stage = stage
        self._total = total
        self._report = report
        self._done = 0
        self._lock = threading.Lock()
        self._told_share = -1.0
        self._told_at = float("-inf")
        self.add(0)

    def add(self, count: int) -> None:
        """`count` more bytes are done."""
        with self._lock:
            self._done += count
            share = min(1.0, self._done / self._total) if self._total else None
            now = time.monotonic()
            if not self._is_news(share, now):
                return
            self._told_share, self._told_at = share or 0.0, now
            done, total = self._done / 1e9, self._total / 1e9
            detail = f"{done:.2f} GB" if share is None else f"{min(done, total):.2f} of {total:.2f} GB"
            self._report(self._stage, share, detail)

    def _is_news(self, share: float | None, now: float) -> bool:
        if share == self._told_share:
            return False
        if share is not None and (share - self._told_share >= _STEP or share == 1.0):
            return True
        return now - self._told_at >= _EVERY_SECONDS


class LinePace:
    """Decides when a line about a stage is due: at its beginning and end, and every LINE_SECONDS between."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stage: str | None = None
        self._began = self._last = 0.0
        self._ended = False

    def due(self, stage: str, share: float | None) -> bool:
        """Whether to print a line now; True counts as printed."""
        now, ended = self._clock(), share is not None and share >= 1.0
        if stage != self._stage:
            self._stage, self._began = stage, now
        elif not (ended and not self._ended) and now - self._last < LINE_SECONDS:
            return False
        self._last, self._ended = now, ended
        return True

    def times(self, share: float | None) -> str:
        """Seconds since the stage began, and how many are left if the pace stays; empty at its beginning."""
        elapsed = self._clock() - self._began
        if elapsed < 1.0:
            return ""
        left = f", about {elapsed / share - elapsed:.0f} s left" if share and share < 1.0 else ""
        return f" after {elapsed:.0f} s{left}"


class _Lines:
    """A text file that turns the redrawing of a bar into lines."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> None:
        if line := text.strip("\r\n "):
            self._out.write(line + "\n")

    def flush(self) -> None:
        self._out.flush()


def progress_bar(*, shown: bool, out: TextIO | None = None, **options: Any) -> tqdm[Any]:
    """A tqdm bar on `out` (standard error) if it is a terminal, else a line every LINE_SECONDS."""
    from tqdm import tqdm

    out = sys.stderr if out is None else out
    if out.isatty():
        return tqdm(disable=not shown, file=out, dynamic_ncols=True, **options)
    options["leave"] = True  # clearing a line would print an empty one
    return tqdm(disable=not shown, file=_Lines(out), ncols=100, mininterval=LINE_SECONDS, **options)
