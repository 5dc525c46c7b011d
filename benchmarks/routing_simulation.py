"""Routing policies over 100 and 1,000 simulated pods: hit rate, time to first token, throughput.

    OMP_NUM_THREADS=1 python benchmarks/routing_simulation.py [--fleets 100,1000] [--seconds S] [--replot]

The policies, the prefix index, the event stream and the accounting are the gateway's own; pods, network and
users are simulated, in a discrete-event simulation. What the model assumes:

Users. `USERS` a pod, closed loop: think (exponential, mean 4 s), send the whole conversation so far, wait for
the whole answer. A conversation starts with a document or system prompt of 512 to 6,144 tokens, drawn by Zipf's
law (exponent 1) out of two a pod, and has 4 turns on average (1 + exponential, rounded down); each turn adds 32
to 400 tokens of question and 64 to 256 of answer.

Pods. All alike, the size of a 70B model on one pod: 2,000 prompt tokens a second, 3,000 blocks of 64 tokens,
decode steps of 30 ms x (1 + running / 64). Prompts are computed one after the other, first come first served,
and do not slow down decodes; a request's decode rate is set when it starts. A request is admitted when its
prompt and answer fit in memory, so nothing is preempted. Blocks nobody uses stay cached until evicted, least
recently used first and the deepest of a chain first. Prompt blocks can be shared once the prompt is computed,
answer blocks once the answer is done.

Gateway. One. Knows of a change in a pod's cache 30 ms later, by an event batch through EventStream; of its load
by a report a second, 50 ms old. Hops and tokenizing take no time. No errors, restarts or cancelled requests.

Measured after a warm-up of 40 % of the simulated time: hit rate (prompt tokens found in the pod's cache), TTFT
from sending to the end of the first decode step, and output tokens a second of the fleet. All policies see
users with the same random numbers. The conversations are synthetic: differences between policies are to be read
from here, not seconds. The default run takes two to three minutes of one core.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np

from leadline.gateway.index.service_index import ServiceIndex
from leadline.gateway.pods import Lease, Pod, eligible
from leadline.gateway.policies.base import RouteRequest
from leadline.gateway.policies.registry import load_policy
from leadline.protocol.events import EventBatch
from leadline.protocol.load import LoadReport

POLICIES = ("prefix", "session", "least-load", "random")
BLOCK = 64
USERS = 12
THINK = 4.0
PREFILL_RATE = 2_000.0
TOTAL_BLOCKS = 3_000
STEP, KNEE = 0.03, 64.0
EVENT_DELAY, REPORT_DELAY, REPORT_EVERY = 0.03, 0.05, 1.0
WARM_UP = 0.4


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
        if request.sent >= self.measured_from:
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
        if request.sent >= self.measured_from:
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


class SimulatedGateway:
    """The gateway's real index, accounting and policy in front of simulated pods."""

    def __init__(self, policy: str, engines: list[SimulatedPod], clock: Clock) -> None:
        self.clock, self.policy = clock, load_policy(policy, seed=1)
        self.index = ServiceIndex(seed=1) if policy == "prefix" else None
        self.engines = {engine.name: engine for engine in engines}
        self.pods = [Pod(engine.name, f"{engine.name}:8000") for engine in engines]
        self.routing_seconds: list[float] = []
        for number, pod in enumerate(self.pods):
            engine = self.engines[pod.id]
            pod.heartbeat(engine.report(), 0.0)
            if self.index is not None:
                self.index.pod_seen(pod.id, pod.epoch)
                engine.publish = self.publish
            # Pods report in turn, not all at once.
            clock.after(REPORT_EVERY * number / len(engines), lambda pod=pod: self.collect(pod))

    def publish(self, batch: EventBatch) -> None:
        self.clock.after(EVENT_DELAY, lambda: self.index.batch(batch))

    def collect(self, pod: Pod) -> None:
        report = self.engines[pod.id].report()
        self.clock.after(REPORT_DELAY, lambda: self.heard(pod, report))
        self.clock.after(REPORT_EVERY, lambda: self.collect(pod))

    def heard(self, pod: Pod, report: LoadReport) -> None:
        pod.heartbeat(report, self.clock.now)
        if self.index is not None:
            self.index.heard(self.clock.now)

    def route(self, request: Request) -> None:
        now, started = self.clock.now, time.perf_counter()
        request.sent = now
        chain = request.chain[: request.prompt // BLOCK]
        matched = self.index.match(chain, now) if self.index is not None else {}
        asked = RouteRequest(
            now=now,
            prompt_tokens=request.prompt,
            max_tokens=256,
            matched_blocks=matched,
            block_size=BLOCK,
            session=request.session,
        )
        decision = self.policy.pick(asked, eligible(self.pods, now))
        pod = decision.pod
        missing = request.prompt - decision.picked.matched_tokens
        request.lease = pod.lease(prefill_tokens=missing, blocks=-(-missing // BLOCK), now=now)
        if self.index is not None:
            self.index.routed(pod.id, chain, matched.get(pod.id, 0), now)
        self.routing_seconds.append(time.perf_counter() - started)
        self.engines[pod.id].send(request)


class User:
    """One person: conversations of several turns, one after the other."""

    def __init__(self, number: int, clock: Clock, gateway: SimulatedGateway, documents: Documents) -> None:
        self.random = random.Random(number)
        self.name, self.clock, self.gateway, self.documents = number, clock, gateway, documents
        self.conversation = 0
        self.turns = 0
        self.chain: list[int] = []
        self.tokens = 0
        # The first conversation is met in its middle, or all users would be in their first turn together.
        self.start()
        self.turns = self.random.randint(1, self.turns)
        clock.after(self.random.uniform(0, 2 * THINK), self.ask)

    def start(self) -> None:
        self.conversation += 1
        self.turns = 1 + int(self.random.expovariate(1 / 3.5))
        self.chain, self.tokens = self.documents.draw(self.random)

    def ask(self) -> None:
        prompt = self.tokens + self.random.randint(32, 400)
        output = self.random.randint(64, 256)
        self.tokens = prompt + output
        fresh = self.tokens // BLOCK - len(self.chain)
        self.chain = self.chain + [self.random.getrandbits(64) for _ in range(fresh)]
        session = f"user {self.name} conversation {self.conversation}"
        self.gateway.route(Request(self.chain, prompt, output, session, self.answered))

    def answered(self) -> None:
        self.turns -= 1
        if self.turns == 0:
            self.start()
        self.clock.after(self.random.expovariate(1 / THINK), self.ask)


class Documents:
    """What conversations begin with, by Zipf's law."""

    def __init__(self, number: int) -> None:
        rng = random.Random(99)
        self.chains = [[rng.getrandbits(64) for _ in range(rng.randint(8, 96))] for _ in range(number)]
        self.cumulative = np.cumsum(1 / np.arange(1, number + 1))

    def draw(self, rng: random.Random) -> tuple[list[int], int]:
        at = int(np.searchsorted(self.cumulative, rng.random() * self.cumulative[-1]))
        chain = self.chains[min(at, len(self.chains) - 1)]
        return chain, len(chain) * BLOCK


def simulate(policy: str, pods: int, seconds: float) -> dict[str, float]:
    clock, totals, started = Clock(), Totals(), time.monotonic()
    measured_from = seconds * WARM_UP
    engines = [SimulatedPod(number, clock, totals, measured_from) for number in range(pods)]
    gateway = SimulatedGateway(policy, engines, clock)
    documents = Documents(2 * pods)
    for number in range(USERS * pods):
        User(number, clock, gateway, documents)

    def tick(part: float) -> None:
        print(f"  {pods:5} pods {policy:10} {part:4.0%}", file=sys.stderr, flush=True)

    clock.run(seconds, tick)
    check_books(gateway, engines)
    p50, p90 = np.percentile(totals.ttft, [50, 90])
    return {
        "hit rate": totals.hit_tokens / totals.prompt_tokens,
        "TTFT p50": float(p50),
        "TTFT p90": float(p90),
        "tokens/s": totals.output_tokens / (seconds - measured_from),
        "requests": len(totals.ttft),
        "routing ms": float(np.median(gateway.routing_seconds)) * 1e3,
        "took": time.monotonic() - started,
    }


def check_books(gateway: SimulatedGateway, engines: list[SimulatedPod]) -> None:
    """Blocks are conserved, and the gateway's in-flight counts are those of the pods."""
    for pod, engine in zip(gateway.pods, engines, strict=True):
        assert pod.in_flight == engine.running + len(engine.queue), "in-flight count differs from the pod's"
        assert engine.free >= 0, "a pod gave out more blocks than it has"
        if not engine.running:
            assert engine.free + len(engine.evictable) == TOTAL_BLOCKS, "a pod lost blocks"


def show(results: dict[tuple[int, str], dict[str, float]]) -> None:
    print(
        f"{'pods':>5}  {'policy':11}{'hit rate':>9}{'TTFT p50':>10}{'p90':>8}{'tokens/s':>11}"
        f"{'requests':>10}{'routing ms':>12}{'took s':>8}"
    )
    for (pods, policy), row in results.items():
        print(
            f"{pods:5}  {policy:11}{row['hit rate']:9.1%}{row['TTFT p50']:10.3f}{row['TTFT p90']:8.3f}"
            f"{row['tokens/s']:11,.0f}{row['requests']:10,.0f}{row['routing ms']:12.3f}{row['took']:8.1f}"
        )


def plot(results: dict[tuple[int, str], dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fleets = sorted({pods for pods, _ in results})
    panels = [
        ("Prompt tokens found in cache", lambda row: row["hit rate"] * 100, "%", "{:.0f}"),
        (
            "Time to first token (bar: p50, line: p90)",
            lambda row: row["TTFT p50"],
            "seconds, log scale",
            "{:.2f}",
        ),
        ("Output tokens per second per pod", None, "tokens/s", "{:.0f}"),
    ]
    colours = {"prefix": "#0b6e4f", "session": "#4a90c2", "least-load": "#e0a030", "random": "#b0b0b0"}
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.6), constrained_layout=True)
    width = 0.8 / len(POLICIES)
    for axis, (title, value, unit, form) in zip(axes, panels, strict=True):
        for offset, policy in enumerate(POLICIES):
            rows = [results[pods, policy] for pods in fleets]
            heights = [row["tokens/s"] / pods for row, pods in zip(rows, fleets, strict=True)]
            if value is not None:
                heights = [value(row) for row in rows]
            places = [group + (offset - (len(POLICIES) - 1) / 2) * width for group in range(len(fleets))]
            axis.bar(places, heights, width * 0.92, color=colours[policy], label=policy)
            for place, height, row in zip(places, heights, rows, strict=True):
                top = height
                if "first token" in title:
                    top = row["TTFT p90"]
                    axis.vlines(place, height, top, color="#333333", linewidth=1.5)
                    axis.hlines(
                        top, place - width * 0.25, place + width * 0.25, color="#333333", linewidth=1.5
                    )
                    label = f"{form.format(height)}\n{form.format(top)}"
                else:
                    label = form.format(height)
                axis.annotate(
                    label,
                    (place, top),
                    (0, 3),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    fontsize=8.5,
                )
        axis.set_title(title, fontsize=11)
        axis.set_ylabel(unit)
        axis.set_xticks(range(len(fleets)), [f"{pods:,} pods" for pods in fleets])
        axis.spines[["top", "right"]].set_visible(False)
        if "first token" in title:
            axis.set_yscale("log")
        axis.margins(y=0.15)
    axes[0].legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.08), fontsize=9)
    figure.suptitle(
        f"Routing policies, simulated: {USERS} users a pod, multi-turn, Zipf-shared documents", fontsize=12.5
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def save(results: dict[tuple[int, str], dict[str, float]]) -> None:
    from record import record

    for (pods, policy), row in results.items():
        base = results[pods, "random"]
        for name, unit in (
            ("hit rate", "share"),
            ("TTFT p50", "s"),
            ("TTFT p90", "s"),
            ("tokens/s", "tokens/s"),
        ):
            record(
                f"routing simulation, {pods} pods, {policy}: {name}",
                round(row[name], 4),
                unit,
                peer_ratio=round(row[name] / base[name], 4),
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fleets", default="100,1000", help="numbers of pods, comma-separated")
    parser.add_argument(
        "--seconds", type=float, help="simulated seconds (default: 60, and 25 from 500 pods on)"
    )
    parser.add_argument(
        "--plot", type=Path, default=Path(__file__).parent / "plots" / "routing_simulation.png"
    )
    parser.add_argument("--no-record", action="store_true", help="leave benchmarks/results.jsonl alone")
    parser.add_argument("--replot", action="store_true", help="only draw the numbers of the last run again")
    options = parser.parse_args()
    numbers = options.plot.with_suffix(".json")
    if options.replot:
        plot(
            {(row.pop("pods"), row.pop("policy")): row for row in json.loads(numbers.read_text())},
            options.plot,
        )
        return
    results = {}
    for pods in map(int, options.fleets.split(",")):
        for policy in POLICIES:
            seconds = options.seconds or (60.0 if pods < 500 else 25.0)
            results[pods, policy] = simulate(policy, pods, seconds)
            show({(pods, policy): results[pods, policy]})
    print()
    show(results)
    plot(results, options.plot)
    rows = [{"pods": pods, "policy": policy, **row} for (pods, policy), row in results.items()]
    numbers.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"\nplot: {options.plot}")
    if not options.no_record:
        save(results)


if __name__ == "__main__":
    main()
