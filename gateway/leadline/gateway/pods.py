"""A pod as the gateway sees it: its name and address, whether it takes requests, and how busy it seems.

Owns the accounting of requests in flight. Discovery writes `ready`, `terminating` and
`circuit`; the event reader calls `heartbeat`; the proxy opens a `Lease` for each attempt; policies read the
estimates. No I/O, no clock: times are monotonic seconds given by the caller.

A load report is up to a heartbeat old, and every gateway sends work in between. Each open lease is therefore
in one of two states, and the estimates are the report plus what it cannot know yet:

    open ──► unseen: counted here, on top of the report            heartbeat(received ≥ start + REPORT_LAG)
               │                                                         │
               │ first_token(): its prefill is over                      ▼
               └──────────────► close() ◄──────────────── seen: counted in the report; closing it before
                                                          the next report is taken off again

Invariants (P16): a lease is counted exactly once between opening and its first `close`, whatever order or
number of calls; all counters are ≥ 0 and are 0 when no lease is open and no report is held; leases of an
earlier epoch never count towards the estimates of a later one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from leadline.protocol.load import LoadReport

__all__ = ["REPORT_LAG", "STALE_REPORT", "Circuit", "ClosedCircuit", "Lease", "Pod", "eligible"]

REPORT_LAG = 0.05
"""Seconds a report takes from being made to being received: requests younger than this are not in it."""
STALE_REPORT = 10.0
"""Seconds after which a report no longer says anything of the queue."""


class Circuit(Protocol):
    """Hook for the circuit breaker: may the pod be tried now?"""

    def allows(self, now: float) -> bool: ...


class ClosedCircuit:
    """No breaker: always try."""

    __slots__ = ()

    def allows(self, now: float) -> bool:
        return True


class Lease:
    """One request attempt on one pod. A context manager; `close` may be called any number of times."""

    __slots__ = ("_epoch", "_open", "_pod", "_prefilling", "_seen", "blocks", "prefill_tokens", "started")

    def __init__(self, pod: "Pod", prefill_tokens: int, blocks: int, now: float) -> None:
        self._pod = pod
        self._epoch = pod.epoch
        self._open = True
        self._prefilling = True
        self._seen = False
        self.prefill_tokens = max(0, prefill_tokens)
        self.blocks = max(0, blocks)
        self.started = now
        pod._opened(self)

    def first_token(self) -> None:
        """The first output byte has come: the prompt is computed."""
        if self._open and self._prefilling:
            self._prefilling = False
            self._pod._prefilled(self)

    def close(self) -> None:
        """The attempt is over, however it ended."""
        if self._open:
            self.first_token()
            self._open = False
            self._pod._closed(self)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(slots=True, eq=False)
class Pod:
    """State of one pod of one service. Compared and hashed by identity."""

    id: str
    address: str
    """host:port."""
    service: str = ""
    epoch: str = ""
    model: str = ""
    served_names: tuple[str, ...] = ()
    task: str = "generate"
    """What its model is served for: generate, embed or rerank."""
    ready: bool = True
    """Discovery says that it takes requests."""
    terminating: bool = False
    """Discovery has seen its deletionTimestamp, or the serving condition gone."""
    resumes: bool | None = None
    """Where it sends no reports: whether its streams could continue on another pod; None: not known."""
    circuit: Circuit = field(default_factory=ClosedCircuit)
    report: LoadReport | None = None
    reported_at: float = float("-inf")

    in_flight: int = 0
    """Requests this gateway has open on the pod."""
    in_flight_prefill_tokens: int = 0
    """Prompt tokens of those whose first byte has not come yet, prefix hits taken off."""
    _unseen: dict[Lease, None] = field(default_factory=dict)
    _unseen_prefill_tokens: int = 0
    _unseen_blocks: int = 0
    _gone_requests: int = 0
    _gone_blocks: int = 0
    _older: float = float("inf")
    """Time of the last report that was ignored as older than the one held."""

    def lease(self, *, prefill_tokens: int, blocks: int, now: float) -> Lease:
        """Count a request attempt until the lease is closed.

        `prefill_tokens`: prompt tokens the pod must compute (matched ones taken off). `blocks`: KV blocks it
        will take.
        """
        return Lease(self, prefill_tokens, blocks, now)

    def heartbeat(self, report: LoadReport, now: float) -> None:
        """A report was received. One older than the report held, of the same epoch, is ignored (Redis came
        back with old data), unless it follows on another such: then the pod's clock was set back."""
        held = self.report
        older = held is not None and held.epoch == report.epoch and report.time < held.time
        if older and report.time <= self._older:
            self._older = report.time
            return
        self._older = float("inf")
        self.restarted(report.epoch)
        self.report, self.reported_at = report, now
        self.model, self.served_names = report.model, tuple(report.served_names)
        self.task = report.task
        self._gone_requests = self._gone_blocks = 0
        for lease in list(self._unseen):
            if lease.started + REPORT_LAG > now:
                break
            self._see(lease)

    def restarted(self, epoch: str) -> None:
        """Note the pod's epoch. A new epoch makes everything reported about its load void."""
        if epoch == self.epoch:
            return
        if self.epoch:
            self.report, self.reported_at = None, float("-inf")
            self._gone_requests = self._gone_blocks = 0
            for lease in list(self._unseen):
                self._see(lease)
        else:
            for lease in self._unseen:
                lease._epoch = epoch
        self.epoch = epoch

    @property
    def draining(self) -> bool:
        """It finishes what it has and must be sent nothing new (P8)."""
        return self.terminating or (self.report is not None and self.report.draining)

    # Estimates for policies

    def load(self, now: float) -> tuple[int, float, int | None]:
        """`requests`, `queued_prefill_tokens` and `free_blocks` at once, for loops over many pods."""
        report = self.report
        age = now - self.reported_at
        if report is None or age > STALE_REPORT:
            return self.in_flight, self.in_flight_prefill_tokens, None
        requests = report.running + report.waiting - self._gone_requests
        queued = report.queued_prefill_tokens - age * report.prefill_tokens_per_second
        total, free = report.total_blocks, report.free_blocks + self._gone_blocks
        return (
            (requests if requests > 0 else 0) + len(self._unseen),
            (queued if queued > 0 else 0) + self._unseen_prefill_tokens,
            (free if free < total else total) - self._unseen_blocks if total else None,
        )

    def requests(self, now: float) -> int:
        """Requests running or waiting on the pod, those of other gateways included once reported."""
        return self.load(now)[0]

    def queued_prefill_tokens(self, now: float) -> float:
        """Prompt tokens still to be computed: what it reported, less what it has done since, plus ours."""
        return self.load(now)[1]

    def free_blocks(self, now: float) -> int | None:
        """KV blocks a new request could take; negative when we have promised too many; None if unknown."""
        return self.load(now)[2]

    # Called by leases

    def _opened(self, lease: Lease) -> None:
        self.in_flight += 1
        self.in_flight_prefill_tokens += lease.prefill_tokens
        self._unseen[lease] = None
        self._unseen_prefill_tokens += lease.prefill_tokens
        self._unseen_blocks += lease.blocks

    def _prefilled(self, lease: Lease) -> None:
        self.in_flight_prefill_tokens -= lease.prefill_tokens
        if not lease._seen:
            self._unseen_prefill_tokens -= lease.prefill_tokens

    def _closed(self, lease: Lease) -> None:
        self.in_flight -= 1
        if not lease._seen:
            self._see(lease)
        elif lease._epoch == self.epoch:
            self._gone_requests += 1
            self._gone_blocks += lease.blocks

    def _see(self, lease: Lease) -> None:
        del self._unseen[lease]
        lease._seen = True
        self._unseen_blocks -= lease.blocks
        if lease._prefilling:
            self._unseen_prefill_tokens -= lease.prefill_tokens


def eligible(pods: Iterable[Pod], now: float) -> list[Pod]:
    """The pods a policy may choose from: ready, not draining, and not shut out by their circuit breaker."""
    return [
        pod
        for pod in pods
        if pod.ready
        and not pod.terminating
        and ((report := pod.report) is None or not report.draining)
        and pod.circuit.allows(now)
    ]
