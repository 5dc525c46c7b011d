"""Inputs that wait for a step, and which of them come next.

A request brings one input or thousands. Requests take turns by the tokens they have had, divided by the
weight of their class (start-time fair queueing), so a request with one input waits for about one step however
many inputs others have queued:

    tag of a request = clock when it came, plus tokens given out / weight
    next input       = that of the request with the smallest tag; the clock moves to that tag

Pure: no torch, no clock of its own.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from leadline.engine.messages import PoolingRequest

__all__ = ["Job", "PoolingQueue"]


@dataclass(slots=True)
class Job:
    """A request, and how much of it has been given out and come back."""

    request: PoolingRequest
    results: list[bytes | None] = field(init=False)
    taken: int = 0
    """Inputs given out."""
    missing: int = field(init=False)
    """Inputs without a result."""
    tokens_left: int = field(init=False)
    """Of inputs that were not given out."""
    started: float | None = None
    """When its first input was given out."""
    gone: bool = False
    """Ended early: results that still come are dropped."""

    def __post_init__(self) -> None:
        count = len(self.request.inputs)
        self.results, self.missing = [None] * count, count
        self.tokens_left = sum(map(len, self.request.inputs))


class PoolingQueue:
    """Requests in the order in which their inputs are computed."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights`: share of each priority class."""
        self._weights = weights
        self._heap: list[tuple[float, int, Job]] = []
        self._order = itertools.count()
        self._clock = 0.0
        self._jobs: dict[str, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    @property
    def has_inputs(self) -> bool:
        """Whether some input was not given out."""
        self._drop_done()
        return bool(self._heap)

    def ahead_of(self, inputs: int) -> int:
        """Inputs that may be given out before the last one of a new request with so many: as they take
        turns, no more than that of each other request."""
        return sum(min(len(job.request.inputs) - job.taken, inputs) for job in self)

    def add(self, request: PoolingRequest) -> None:
        job = self._jobs[request.request_id] = Job(request)
        heapq.heappush(self._heap, (self._clock, next(self._order), job))

    def take(self, now: float, *, max_tokens: int, max_inputs: int) -> list[tuple[Job, int]]:
        """Give out the next inputs, as (job, index): up to `max_tokens` tokens, but at least one input."""
        taken: list[tuple[Job, int]] = []
        tokens = 0
        while self.has_inputs and len(taken) < max_inputs:
            tag, order, job = self._heap[0]
            count = len(job.request.inputs[job.taken])
            if taken and tokens + count > max_tokens:
                break
            taken.append((job, job.taken))
            tokens += count
            job.taken += 1
            job.tokens_left -= count
            job.started = now if job.started is None else job.started
            self._clock = tag
            if job.taken < len(job.results):
                tag += count / self._weights[job.request.priority_class]
                heapq.heapreplace(self._heap, (tag, order, job))
            else:
                heapq.heappop(self._heap)
        return taken

    def remove(self, request_id: str) -> Job | None:
        """End a request, finished or not; None if it is not known."""
        job = self._jobs.pop(request_id, None)
        if job is not None:
            job.gone = True
        return job

    def _drop_done(self) -> None:
        while self._heap and self._heap[0][2].gone:
            heapq.heappop(self._heap)
