"""How many prompt tokens a step may compute, so that decoding requests soon get their next token.

A prompt token costs its matrix products, and attention to every token before it. Work counts both in units
of one token's products:

    work of a chunk [start, start + count)  =  count + attention * count * (start + count / 2)

`attention`, the cost of one key relative to one token's products, follows from the model's shape
(`models/cost.py`). How many seconds a unit takes is measured: by every step that computed prompt tokens.
"""

from __future__ import annotations

import math

from leadline.engine.core.plan import StepPlan

__all__ = ["LEAST_TOKENS", "StepTime"]

LEAST_TOKENS = 64
"""A step computes so many prompt tokens however long they take, so that every prompt makes progress."""
_FIRST_WORK = 1024.0
"""Allowed before any step was measured."""
_WEIGHT = 0.3
"""Of a new measurement, if the step did as much work as one may do."""


class StepTime:
    """Bounds the prompt tokens of a step by time. `seconds`: what a step may take."""

    def __init__(self, seconds: float, attention: float) -> None:
        self._seconds, self._attention = seconds, attention
        self._pace = 0.0
        """Seconds a unit of work, the step's decode rows included; 0.0 until measured."""

    def allowed(self) -> float:
        """Work that a step may do."""
        return max(self._seconds / self._pace, float(LEAST_TOKENS)) if self._pace else _FIRST_WORK

    def work(self, start: int, count: int) -> float:
        """Of a chunk of `count` tokens that begins at position `start`."""
        return count + self._attention * count * (start + count / 2)

    def tokens(self, start: int, work: float) -> int:
        """The most tokens from position `start` on that take no more than `work`."""
        if work <= 0:
            return 0
        linear, square = 1 + self._attention * start, self._attention / 2
        if square == 0:
            return int(work)
        return int((math.sqrt(linear * linear + 4 * square * work) - linear) / (2 * square))

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step that took `seconds`.

        What a step takes beside its prompt tokens counts as part of their pace: where that is a large part,
        smaller chunks have a slower pace, and the size that takes the time allowed is found all the same.
        """
        done = sum(
            self.work(row.start, row.count) for row in plan.rows if row.count > 1 and row.tokens is None
        )
        if not done:
            return
        pace = seconds / done
        if not self._pace:
            self._pace = pace
            return
        # A step may have compiled a kernel, and the last chunk of a prompt may be a few tokens.
        pace = min(max(pace, self._pace / 2), self._pace * 2)
        self._pace += _WEIGHT * min(1.0, done / self.allowed()) * (pace - self._pace)
