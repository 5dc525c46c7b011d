"""Routing policies over 100 and 1,000 simulated pods: hit rate, time to first token, throughput.

    OMP_NUM_THREADS=1 python benchmarks/routing_simulation.py [--fleets 100,1000] [--seconds S] [--replot]

The policies, the prefix index, the event stream and the accounting are the gateway's own; pods, network and
users are simulated, in a discrete-event simulation. What the model assumes:

Users. `USERS` a pod, closed loop: think (exponential, mean 4 s), send the whole conversation so far, wait for
the whole answer. A conversation starts with a document or system prompt of 512 to 6,144 tokens, drawn by
Zipf's law (exponent 1) out of two a pod, and has 4 turns on average (1 + exponential, rounded down); each
turn adds 32 to 400 tokens of question and 64 to 256 of answer.

Pods. All alike, the size of a 70B model on one pod: 2,000 prompt tokens a second, 3,000 blocks of 64 tokens,
decode steps of 30 ms x (1 + running / 64). Prompts are computed one after the other, first come first served,
and do not slow down decodes; a request's decode rate is set when it starts. A request is admitted when its
prompt and answer fit in memory, so nothing is preempted. Unused blocks stay cached until evicted, least
recently used first and the deepest of a chain first. Prompt blocks can be shared once the prompt is computed,
answer blocks once the answer is done.

Gateway. One. Knows of a change in a pod's cache 30 ms later, by an event batch through EventStream; of its
load by a report a second, 50 ms old. Hops and tokenizing take no time. No errors, restarts or cancelled
requests.

Measured in what is left after a warm-up of 40 % of the simulated time: hit rate of the prompts admitted then
(tokens found in the pod's cache), TTFT of the requests whose first token came then (from sending to the end
of the first decode step), and output tokens a second of the fleet. All policies see users with the same
random numbers. The conversations are synthetic: differences between policies are to be read from here, not
seconds. The default run takes two to three minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import numpy as np

from leadline.gateway.index.service_index import ServiceIndex
from leadline.gateway.pods import Pod, eligible
from leadline.gateway.policies.base import RouteRequest, load_policy
from leadline.protocol.events import EventBatch
from leadline.protocol.load import LoadReport
from simulated_engine import BLOCK, Clock, Request, SimulatedPod, Totals, check_books

POLICIES = ("prefix", "session", "least-load", "random")
USERS = 12
THINK = 4.0
EVENT_DELAY, REPORT_DELAY, REPORT_EVERY = 0.03, 0.05, 1.0
WARM_UP = 0.4
TITLE = f"Routing policies, simulated: {USERS} users a pod, multi-turn, Zipf-shared documents"


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
    clock, totals, started = Clock(), Totals(), time.thread_time()
    measured_from = seconds * WARM_UP
    engines = [SimulatedPod(number, clock, totals, measured_from) for number in range(pods)]
    gateway = SimulatedGateway(policy, engines, clock)
    documents = Documents(2 * pods)
    for number in range(USERS * pods):
        User(number, clock, gateway, documents)

    def tick(part: float) -> None:
        print(f"  {pods:5} pods {policy:10} {part:4.0%}", file=sys.stderr, flush=True)

    clock.run(seconds, tick)
    check_accounting(gateway, engines)
    check_books(engines)
    p50, p90 = np.percentile(totals.ttft, [50, 90])
    return {
        "hit rate": totals.hit_tokens / totals.prompt_tokens,
        "TTFT p50": float(p50),
        "TTFT p90": float(p90),
        "tokens/s": totals.output_tokens / (seconds - measured_from),
        "first tokens": len(totals.ttft),
        "routing ms": float(np.median(gateway.routing_seconds)) * 1e3,
        "took": time.thread_time() - started,
    }


def check_accounting(gateway: SimulatedGateway, engines: list[SimulatedPod]) -> None:
    """The gateway's in-flight counts are those of the pods."""
    for pod, engine in zip(gateway.pods, engines, strict=True):
        assert pod.in_flight == engine.running + len(engine.queue), "in-flight count differs from the pod's"


def show(results: dict[tuple[int, str], dict[str, float]]) -> None:
    print(
        f"{'pods':>5}  {'policy':11}{'hit rate':>9}{'TTFT p50':>10}{'p90':>8}{'tokens/s':>11}"
        f"{'answered':>10}{'routing ms':>12}{'CPU s':>8}"
    )
    for (pods, policy), row in results.items():
        print(
            f"{pods:5}  {policy:11}{row['hit rate']:9.1%}{row['TTFT p50']:10.3f}{row['TTFT p90']:8.3f}"
            f"{row['tokens/s']:11,.0f}{row['first tokens']:10,.0f}{row['routing ms']:12.3f}{row['took']:8.1f}"
        )


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


def draw(results: dict[tuple[int, str], dict[str, float]], path: Path) -> None:
    from routing_plot import plot

    groups = {
        (f"{pods:,} pods", policy): {**row, "tokens/s": row["tokens/s"] / pods}
        for (pods, policy), row in results.items()
    }
    plot(groups, TITLE, path, "Output tokens per second per pod")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fleets", default="100,1000", help="numbers of pods, comma-separated")
    parser.add_argument(
        "--seconds", type=float, help="simulated seconds (default: 60, and 30 from 500 pods on)"
    )
    parser.add_argument(
        "--plot", type=Path, default=Path(__file__).parent / "plots" / "routing_simulation.png"
    )
    parser.add_argument("--no-record", action="store_true", help="leave benchmarks/results.jsonl alone")
    parser.add_argument("--replot", action="store_true", help="only draw the numbers of the last run again")
    options = parser.parse_args()
    numbers = options.plot.with_suffix(".json")
    if options.replot:
        rows = json.loads(numbers.read_text())
        draw({(row.pop("pods"), row.pop("policy")): row for row in rows}, options.plot)
        return
    results = {}
    for pods in map(int, options.fleets.split(",")):
        for policy in POLICIES:
            seconds = options.seconds or (60.0 if pods < 500 else 30.0)
            results[pods, policy] = simulate(policy, pods, seconds)
            show({(pods, policy): results[pods, policy]})
    print()
    show(results)
    draw(results, options.plot)
    rows = [{"pods": pods, "policy": policy, **row} for (pods, policy), row in results.items()]
    numbers.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"\nplot: {options.plot}")
    if not options.no_record:
        save(results)


if __name__ == "__main__":
    main()
