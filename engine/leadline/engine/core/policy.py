"""Which sequence is served next: the order of waiting sequences, shares of the prefill budget, preemption.

The scheduler does the work (slots, blocks, chunks) and asks its policy only for choices. In each step:

    begin_step(budget, classes)      budget tokens are left after decodes
    limit(seq) / peek() / charge()   running prefills, then admissions, each within its share
    lift_limits()                    what some did not use is open to all; the same round once more

A policy owns only its queue. It must not change the sequences that it is given.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from leadline.engine.core.sequence import Sequence

__all__ = ["SchedulingPolicy", "WeightedPolicy"]


@runtime_checkable
class SchedulingPolicy(Protocol):
    """Built with the keyword `class_weights`.

    Named by an entry point in the group `leadline.scheduling_policies`.
    """

    def enqueue(self, seq: Sequence) -> None:
        """`seq` starts to wait: it is new, was preempted (`seq.preemptions > 0`), or waits no longer for
        another's
        prefill; then it should get back the place its `seq_id` (order of arrival) gives it."""

    def withdraw(self, seq: Sequence) -> None:
        """`seq`, which is queued, is not to be offered any more: admitted, parked, aborted or timed out."""

    def peek(self) -> Sequence | None:
        """The queued sequence to admit next, or None if nothing may be admitted within the current limits.

        If it cannot be admitted for want of blocks or of a slot, admission stops for this step: no other
        sequence overtakes it.
        """

    def begin_step(self, budget: int, prefilling: Iterable[str]) -> None:
        """A step starts; `budget` prefill tokens can be shared out.

        Prefilling: classes with a prefill under way.
        """

    def limit(self, seq: Sequence) -> int:
        """Most prefill tokens `seq` may get now."""

    def charge(self, seq: Sequence, tokens: int) -> None:
        """`seq` was given `tokens` prefill tokens of this step."""

    def lift_limits(self) -> None:
        """Open the rest of the budget to every sequence that can use it: all had their share of this step."""

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """Which of `running` (never empty) to preempt when a decode needs a block and there is none."""

    def waiting(self) -> Mapping[str, int]:
        """Queued sequences by class, for statistics."""


class _ClassQueue:
    """FIFO of one class with its weight and accounts.

    A heap, because preempted and parked ones come back in order.
    """

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.virtual_time = 0.0
        """Prefill tokens received for the first time, over weight: the class with the least is next."""
        self.share = 0.0
        """Tokens of this step's budget it may still use."""
        self.active = False
        self.members: set[Sequence] = set()
        self._heap: list[tuple[bool, int, Sequence]] = []

    def push(self, seq: Sequence) -> None:
        self.members.add(seq)
        heapq.heappush(self._heap, (not seq.preemptions, seq.seq_id, seq))

    def head(self) -> Sequence | None:
        heap = self._heap
        while heap and heap[0][2] not in self.members:
            heapq.heappop(heap)
        return heap[0][2] if heap else None


class WeightedPolicy:
    """Classes share the prefill budget by weight (stride scheduling); FIFO within a class.

    Each class has a virtual time: prefill tokens received divided by its weight. The class with the least is
    first in line for slots and blocks, so over time classes that always have work receive tokens in
    proportion to their weights and none starves. Within one step no class takes more than its share of the
    budget while another could use it, so a long batch prompt cannot delay an interactive one by a whole step.
    A class that was idle resumes at the others' virtual time: idling earns nothing. Preempted sequences come
    before new ones of their class.

    Victims: the latest arrival of the class that is furthest ahead of its share; if classes are equal, of the
    class with the least weight. So under lasting pressure a class keeps its share of the tokens too.
    Recomputing a preempted sequence is not charged: else a class that is preempted often would fall behind.
    """

    def __init__(self, class_weights: Mapping[str, float]) -> None:
        self._classes = {name: _ClassQueue(weight) for name, weight in class_weights.items()}
        self._clock = 0.0
        self._unlimited = False

    def enqueue(self, seq: Sequence) -> None:
        self._classes[seq.priority_class].push(seq)

    def withdraw(self, seq: Sequence) -> None:
        self._classes[seq.priority_class].members.discard(seq)

    def peek(self) -> Sequence | None:
        best: _ClassQueue | None = None
        for queue in self._classes.values():
            may = self._unlimited or queue.share >= 1.0
            if may and queue.members and (best is None or queue.virtual_time < best.virtual_time):
                best = queue
        return best.head() if best is not None else None

    def begin_step(self, budget: int, prefilling: Iterable[str]) -> None:
        self._unlimited = False
        under_way = set(prefilling)
        active = []
        for name, queue in self._classes.items():
            was_active = queue.active
            queue.active = bool(queue.members) or name in under_way
            if not queue.active:
                queue.share = 0.0
                continue
            if not was_active:
                queue.virtual_time = max(queue.virtual_time, self._clock)
            active.append(queue)
        if not active:
            return
        self._clock = max(self._clock, min(queue.virtual_time for queue in active))
        total = sum(queue.weight for queue in active)
        # A class that could not use its share (one chunk a step, say) must not save up for a later monopoly.
        floor = max(queue.virtual_time for queue in active) - 8 * budget / min(
            queue.weight for queue in active
        )
        for queue in active:
            queue.virtual_time = max(queue.virtual_time, floor)
            # A fraction of a token is carried over, so that a small weight gets its turn even in tiny
            # budgets.
            carried = min(max(queue.share, 0.0), 1.0)
            queue.share = carried + budget * queue.weight / total

    def limit(self, seq: Sequence) -> int:
        return 1 << 62 if self._unlimited else int(self._classes[seq.priority_class].share)

    def charge(self, seq: Sequence, tokens: int) -> None:
        queue = self._classes[seq.priority_class]
        if not seq.preemptions:  # who pays for a preemption is no measure of who was served
            queue.virtual_time += tokens / queue.weight
        queue.share -= tokens

    def lift_limits(self) -> None:
        self._unlimited = True

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        def order(seq: Sequence) -> tuple[float, float, int]:
            queue = self._classes[seq.priority_class]
            return queue.virtual_time, -queue.weight, seq.seq_id

        return max(running, key=order)

    def waiting(self) -> Mapping[str, int]:
        return {name: len(queue.members) for name, queue in self._classes.items()}
