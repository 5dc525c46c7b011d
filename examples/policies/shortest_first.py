"""A scheduling policy: short prompts first, with ageing.

The mean time to first token is least when short prefills go first, but then a long prompt may wait without
end. So each request is ranked by `tokens to prefill + ageing * order of arrival`: a prompt of n tokens can be
overtaken by at most n / ageing later ones. Priority classes are ignored.

    [project.entry-points."leadline.scheduling_policies"]
    shortest-first = "shortest_first:ShortestFirst"
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from leadline.engine.core.sequence import Sequence

__all__ = ["ShortestFirst"]


class ShortestFirst:
    """Smallest rank first; preempted sequences before new ones; the latest arrival is preempted first."""

    def __init__(self, class_weights: Mapping[str, float], ageing: int = 32) -> None:
        self._ageing = ageing
        self._heap: list[tuple[bool, int, int, Sequence]] = []
        self._queued: set[Sequence] = set()

    def enqueue(self, seq: Sequence) -> None:
        rank = len(seq.token_ids) + self._ageing * seq.seq_id
        heapq.heappush(self._heap, (not seq.preemptions, rank, seq.seq_id, seq))
        self._queued.add(seq)

    def withdraw(self, seq: Sequence) -> None:
        self._queued.discard(seq)  # its heap entry is dropped when it comes up

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][3] not in self._queued:
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None

    def begin_step(self, budget: int, prefilling: Iterable[str]) -> None:
        self._budget = budget

    def limit(self, seq: Sequence) -> int:
        return self._budget

    def charge(self, seq: Sequence, tokens: int) -> None:
        pass

    def lift_limits(self) -> None:
        pass

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        return max(running, key=lambda seq: seq.seq_id)

    def waiting(self) -> Mapping[str, int]:
        counts: dict[str, int] = {}
        for seq in self._queued:
            counts[seq.priority_class] = counts.get(seq.priority_class, 0) + 1
        return counts
