"""Queue timeouts and deadlines: a heap of times, checked once a step."""

from __future__ import annotations

import heapq
from typing import Literal

from leadline.engine.core.sequence import Sequence

__all__ = ["Timeouts"]

Kind = Literal["queue_timeout", "deadline"]


class Timeouts:
    """Times at which something may have to end. Entries of finished sequences are dropped lazily."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Kind, Sequence]] = []
        self._unplanned: list[tuple[float, Sequence]] = []
        """Queue timeouts of requests that no step has been planned for yet."""
        self._sweep_at = 1024

    def watch(self, seq: Sequence, queue_timeout: float | None) -> None:
        """Watch the request's queue timeout (seconds after arrival) and deadline, where it has them."""
        request = seq.request
        if queue_timeout is not None:
            self._unplanned.append((request.arrival + queue_timeout, seq))
        if request.deadline is not None:
            self._push(request.deadline, "deadline", seq)

    def planned(self) -> None:
        """A step was planned that could admit whoever waits: a queue timeout of 0 means that step."""
        for when, seq in self._unplanned:
            if seq.admitted_at is None:
                self._push(when, "queue_timeout", seq)
        self._unplanned.clear()

    def _push(self, when: float, kind: Kind, seq: Sequence) -> None:
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if not entry[3].finished]
            heapq.heapify(self._heap)
            self._sweep_at = max(1024, 2 * len(self._heap))
        heapq.heappush(self._heap, (when, seq.seq_id, kind, seq))

    def due(self, now: float) -> list[tuple[Sequence, Kind]]:
        """Sequences to end now; a queue timeout counts only for those that were never admitted."""
        ended: list[tuple[Sequence, Kind]] = []
        heap = self._heap
        while heap and heap[0][0] <= now:
            _, _, kind, seq = heapq.heappop(heap)
            if not seq.finished and (kind == "deadline" or seq.admitted_at is None):
                ended.append((seq, kind))
        return ended
