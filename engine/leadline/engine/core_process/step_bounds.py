"""How long a step may take before it counts as hung: far longer than any step of its size took.

    seconds allowed  =  max(10, 20 * the longest step of this size so far)

Launching a step and waiting for it are measured apart: on a CPU the launch computes the step, and the wait is
short.

The size is a power of two of the tokens that the step computes, where a chunk of a prompt counts more the
further in the context it begins. The first step of a size has no bound: it may compile kernels or capture a
graph. It counts as a measurement only until there is a second one. A later step counts as at most twice as
long as the longest before, so that one that hung and went on does not allow the next to hang for minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from leadline.engine.core.plan import StepPlan

__all__ = ["StepBounds"]

_LEAST_SECONDS = 10.0
_TIMES = 20.0
_FADE = 0.999
"""Each step takes this much off what is remembered of longer ones."""
_KEYS_A_TOKEN = 4096
"""Attention to this many keys takes about as long as the rest of a token's computation."""
_Part = tuple[int, bool]
"""A step's size, and whether it is waited for."""


class StepBounds:
    """Calls `begin` with the seconds that a starting step may take (0.0: no bound is known), and `end` when
    the last step has been computed."""

    def __init__(
        self,
        begin: Callable[[float], None],
        end: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._begin, self._end, self._clock = begin, end, clock
        self._longest: dict[_Part, float] = {}
        self._firsts: set[_Part] = set()
        """Parts that were measured once so far."""
        self._part: _Part | None = None
        """What is being computed; None: nothing."""
        self._since = 0.0
        self._launched = -1
        """The latest step that was launched."""

    def enter(self, plan: StepPlan) -> None:
        """A step is about to be launched, or to be waited for."""
        now = self._clock()
        self._observe(now)
        self._part, self._since = (_size(plan), plan.step_id <= self._launched), now
        self._launched = max(self._launched, plan.step_id)
        longest = self._longest.get(self._part)
        self._begin(0.0 if longest is None else max(_LEAST_SECONDS, _TIMES * longest))

    def leave(self) -> None:
        """Nothing is computed, or waited for, from now on."""
        self._observe(self._clock())
        self._part = None
        self._end()

    def _observe(self, now: float) -> None:
        part, seconds = self._part, now - self._since
        if part is None:
            return
        longest = self._longest.get(part)
        if longest is None:
            self._firsts.add(part)
        elif part in self._firsts:
            self._firsts.discard(part)
        else:
            seconds = min(seconds, max(2 * longest, _LEAST_SECONDS / _TIMES))
            seconds = max(seconds, longest * _FADE)
        self._longest[part] = seconds


def _size(plan: StepPlan) -> int:
    work = float(len(plan.rows))
    for row in reversed(plan.rows):
        if row.count == 1:  # these come first
            break
        work += row.count * (1 + (row.start + row.count / 2) / _KEYS_A_TOKEN)
    return int(work).bit_length()
