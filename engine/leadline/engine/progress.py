"""How far a start has come: stages, and the share of bytes in those that move some.

Whoever does the work calls a `ReportStage`; the core's process turns the calls into `wire.Progress`, and the
server into what `/health` and `/ready` say. Pure Python, no torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["ByteMeter", "ReportStage", "no_report"]

ReportStage = Callable[[str, float | None, str], None]
"""(stage, share done in [0, 1] or None where no end is known, detail). Must be quick. Called from one thread
at a time, not always the same."""

_EVERY_SECONDS = 0.5
_STEP = 0.01


def no_report(stage: str, fraction: float | None, detail: str) -> None:
    """Nobody wants to know."""


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
