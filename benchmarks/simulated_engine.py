"""A pod in simulated time: a first-come prefill queue, a KV cache with LRU eviction, and decodes.

routing_simulation.py states what this model assumes.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from leadline.gateway.pods import Lease
from leadline.protocol.events import EventBatch
from leadline.protocol.load import LoadReport

__all__ = ["BLOCK", "Clock", "Request", "SimulatedPod", "Totals", "check_books"]

BLOCK = 64
PREFILL_RATE = 2_000.0
TOTAL_BLOCKS = 3_000
STEP, KNEE = 0.03, 64.0


class Clock:
    """The event queue."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = count()

    def after(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._ties), action))

    def run(self, until: float, tick: Callable[[float], None]) -> None:
        shown = time.monotonic()
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
            if time.monotonic() - shown > 5:
                shown = time.monotonic()
                tick(self.now / until)


@dataclass(slots=True, eq=False)
class Request:
    chain: list[int]
    """Hashes of all full blocks once the answer is there; the first `prompt // BLOCK` are the prompt's."""
    prompt: int
    output: int
    session: str
    answered: Callable[[], None]
    sent: float = 0.0
    lease: Lease | None = None
    missing: int = 0
    private: int = 0


@dataclass
class Totals:
    ttft: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    hit_tokens: int = 0
    output_tokens: int = 0
    predicted_error: int = 0


class SimulatedPod:
    """An engine: a first-come prefill queue, a KV cache with LRU eviction, and decodes."""

    def __init__(self, number: int, clock: Clock, totals: Totals, measured_from: float) -> None:
        self.name, self.epoch = f"pod-{number}", f"uid-{number}"
        self.clock, self.totals, self.measured_from = clock, totals, measured_from
        self.pins: dict[int, int] = {}
        self.evictable: OrderedDict[int, None] = OrderedDict()
        self.free = TOTAL_BLOCKS
        self.running = 0
        self.queue: deque[Request] = deque()
        self.computing = False
        self.seq = 0
        self.publish: Callable[[EventBatch], None] = lambda batch: None

    def send(self, request: Request) -> None:
        # The engine counts what its cache lacks at arrival, for its load report.
        prompt_blocks = min(request.prompt // BLOCK, (request.prompt - 1) // BLOCK)
        request.missing = request.prompt - BLOCK * self.held(request.chain, prompt_blocks)
        self.queue.append(request)
        self.admit()

    def held(self, chain: list[int], most: int) -> int:
        depth = 0
        while depth < most and (chain[depth] in self.pins or chain[depth] in self.evictable):
            depth += 1
        return depth

    def admit(self) -> None:
        if self.computing or not self.queue:
            return
        request = self.queue[0]
        chain, prompt_blocks = request.chain, request.prompt // BLOCK
        hits = self.held(chain, min(prompt_blocks, (request.prompt - 1) // BLOCK))
        needed = -(-(request.prompt + request.output) // BLOCK) - hits
        revived = sum(block in self.evictable for block in chain[:hits])
        if self.free + len(self.evictable) - revived < needed:
            return  # until a decode ends
        self.queue.popleft()
        for block in chain[:hits]:
            self.evictable.pop(block, None)
            self.pins[block] = self.pins.get(block, 0) + 1
        removed = []
        while self.free < needed:
            removed.append(self.evictable.popitem(last=False)[0])
            self.free += 1
        self.free -= needed
        request.private = needed
        if removed:
            self.tell(removed=removed)
        if self.clock.now >= self.measured_from:
            self.totals.prompt_tokens += request.prompt
            self.totals.hit_tokens += hits * BLOCK
        request.missing = request.prompt - hits * BLOCK
        self.computing = True
        self.running += 1
        self.clock.after(request.missing / PREFILL_RATE, lambda: self.computed(request, hits))

    def computed(self, request: Request, hits: int) -> None:
        self.computing = False
        self.keep(request, hits, request.prompt // BLOCK)
        step = STEP * (1 + self.running / KNEE)
        self.clock.after(step, lambda: self.first_token(request, step))
        self.admit()

    def first_token(self, request: Request, step: float) -> None:
        if self.clock.now >= self.measured_from:
            self.totals.ttft.append(self.clock.now - request.sent)
        assert request.lease is not None
        request.lease.first_token()
        self.clock.after(step * (request.output - 1), lambda: self.done(request))

    def done(self, request: Request) -> None:
        self.running -= 1
        self.keep(request, request.prompt // BLOCK, len(request.chain))
        self.free += request.private
        for block in reversed(request.chain):  # deepest first, so that it is evicted first
            pins = self.pins.get(block)
            if pins == 1:
                del self.pins[block]
                self.evictable[block] = None
            elif pins is not None:
                self.pins[block] = pins - 1
        if self.clock.now >= self.measured_from:
            self.totals.output_tokens += request.output
        assert request.lease is not None
        request.lease.close()
        request.answered()
        self.admit()

    def keep(self, request: Request, start: int, stop: int) -> None:
        """The request's own blocks start..stop are full: others can use them from now on."""
        stored = []
        for block in request.chain[start:stop]:
            if block in self.pins:
                self.pins[block] += 1  # someone else computed it meanwhile: ours is a copy, freed at the end
            elif block in self.evictable:
                del self.evictable[block]
                self.pins[block] = 1
            else:
                self.pins[block] = 1
                request.private -= 1
                stored.append(block)
        if stored:
            self.tell(stored=stored)

    def tell(self, **changes: list[int]) -> None:
        batch = EventBatch(epoch=self.epoch, seq=self.seq, **changes)
        self.seq += 1
        self.publish(batch)

    def report(self) -> LoadReport:
        return LoadReport(
            pod=self.name,
            address=f"{self.name}:8000",
            epoch=self.epoch,
            time=self.clock.now,
            model="simulated",
            block_size=BLOCK,
            running=self.running,
            waiting=len(self.queue),
            queued_prefill_tokens=sum(request.missing for request in self.queue),
            free_blocks=self.free + len(self.evictable),
            total_blocks=TOTAL_BLOCKS,
            prefill_tokens_per_second=PREFILL_RATE,
            decode_step_seconds=STEP * (1 + self.running / KNEE),
        )


def check_books(engines: list[SimulatedPod]) -> None:
    """Blocks are conserved."""
    for engine in engines:
        assert engine.free >= 0, "a pod gave out more blocks than it has"
        if not engine.running:
            assert engine.free + len(engine.evictable) == TOTAL_BLOCKS, "a pod lost blocks"
