"""Admission to every service: admits a request at once, queues it, or refuses it.

Lives on one event loop.

    async with admission.enter(service, principal, deadline, cost) as admittance:
        decision = policy.pick(request, admission.candidates(service, now))
        with decision.pod.lease(…):
            admittance.routed()      from here on the lease counts, not the admittance
            …                        retries and migrations need no new admittance
    # leaving the block admits the next request

A request is admitted at once if no other waits and some pod has spare capacity (capacity.py). Otherwise it
waits in fair order (fair_queue.py). A queue is checked when an admittance ends, when `changed` is called (a
report, a pod that came or went, a circuit that closed), and every `TICK` while a request waits, for changes
by time alone (a circuit opens for a probe, a report goes stale).

A service that sleeps without requests (`autoscaling.min: 0`) gets a pod because a request waits here: the
operator reads how many do. Such a request waits up to `wakeSeconds`, or until the operator reports that no
pod can come.

Invariants (P16): a request takes capacity from its admission until its lease is counted or its admittance
ends, on every path, also when it is cancelled at the moment of its admission; `pending` and `waiting` return
to 0.
"""

import asyncio
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from leadline.gateway.admission.capacity import spare_capacity, unsaturated
from leadline.gateway.admission.fair_queue import DrainRate, FairQueue
from leadline.gateway.config.settings import AdmissionConfig
from leadline.gateway.errors import DeadlinePassed, GatewayRefusal, NoPods, QueueFull, QueueTimeout
from leadline.gateway.pods import Pod, eligible
from leadline.gateway.services import Service

__all__ = ["TICK", "Admission", "AdmissionStats", "Admittance", "Client", "ServiceAdmission"]


class Client(Protocol):
    """What admission needs to know about a caller; `access.principal.Principal` is one."""

    @property
    def tenant(self) -> str: ...

    @property
    def priority_class(self) -> str: ...


@dataclass(slots=True)
class AdmissionStats:
    """Counts of one service since the start."""

    admitted: int = 0
    """Admitted requests, with those that had waited."""
    queued: int = 0
    """Requests that had to wait."""
    refused: dict[str, int] = field(default_factory=dict)
    """Refusals by code: queue_full, queue_timeout, no_pods, deadline_exceeded."""
    cancelled: int = 0
    """Clients that left while they waited."""
    waited_seconds: float = 0.0
    """Sum over admitted requests."""


class Admittance:
    """The admission of one request. An async context manager; made by `Admission.enter`."""

    __slots__ = (
        "_admission",
        "_class",
        "_cost",
        "_deadline",
        "_held_from",
        "_pending",
        "_queue_timeout",
        "_state",
        "_tenant",
        "_timer",
        "_turn",
        "waited_seconds",
    )

    def __init__(
        self,
        admission: "Admission",
        state: "ServiceAdmission",
        client: Client,
        deadline: float | None,
        cost: float,
        queue_timeout: float,
    ) -> None:
        self._admission = admission
        self._state = state
        self._tenant = client.tenant
        self._class = client.priority_class
        self._deadline = deadline
        self._cost = max(1.0, cost)
        self._queue_timeout = queue_timeout
        self._pending = False
        self._turn: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._held_from = 0.0
        self.waited_seconds = 0.0
        """Seconds in the queue."""

    def routed(self) -> None:
        """Note that a lease of this request is open: the pod counts it now. May be called any number of
        times."""
        if self._pending:
            self._pending = False
            self._state.pending -= 1

    def try_enter(self) -> bool:
        """Return whether the request is admitted at once; if not, await `wait`. Raises as entering the
        context does. An admitted request must `leave`, whatever happens."""
        return self._admission._ask(self)

    async def wait(self) -> None:
        """Wait in the queue, after `try_enter` has returned False. Raises as entering the context does; then
        there is nothing to leave."""
        await self._admission._wait(self)

    def leave(self) -> None:
        """Give the capacity to the next request."""
        self.routed()
        if self._state.queue:
            self._admission.changed(self._state.service)

    async def __aenter__(self) -> "Admittance":
        if not self.try_enter():
            await self.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


class ServiceAdmission:
    """What admission keeps for one service."""

    __slots__ = ("check_soon", "pending", "queue", "rate", "service", "stats", "tick")

    def __init__(self, service: Service, config: AdmissionConfig) -> None:
        self.service = service
        self.queue: FairQueue[Admittance] = FairQueue(config.class_weights, config.tenant_weights)
        self.pending = 0
        """Admitted requests without a lease yet."""
        self.rate = DrainRate()
        self.stats = AdmissionStats()
        self.check_soon = False
        self.tick: asyncio.TimerHandle | None = None


TICK = 0.1
"""Seconds between checks of a queue in which requests wait."""
_NO_PODS_RETRY = 5.0
"""A pod takes its time to start."""


class Admission:
    """Admission to all services."""

    def __init__(self, config: AdmissionConfig | None = None) -> None:
        self.config = config or AdmissionConfig()
        self._states: dict[Service, ServiceAdmission] = {}

    def enter(
        self,
        service: Service,
        client: Client,
        deadline: float | None = None,
        cost: float = 1,
        *,
        queue_timeout: float | None = None,
    ) -> Admittance:
        """Return a context that is entered once the request may be sent on.

        `deadline`: monotonic seconds after which the client does not want an answer. `cost`: the weight of
        the request in fairness; expected tokens, prompt and output. `queue_timeout`: seconds that the client
        is ready to wait, if less than the configured timeout; 0: only if there is capacity now. Entering
        raises QueueFull (429), QueueTimeout and NoPods (503), all with `retry_after`, and DeadlinePassed
        (504).
        """
        limit = self.config.queue_timeout_seconds
        if service.wake_seconds > limit and not eligible(service.pods.values(), time.monotonic()):
            limit = service.wake_seconds
        if queue_timeout is not None and queue_timeout < limit:
            limit = queue_timeout
        return Admittance(self, self._state_of(service), client, deadline, cost, limit)

    def candidates(self, service: Service, now: float) -> list[Pod]:
        """Return the pods for a policy to pick from: eligible ones with spare capacity. If none has any
        (several attempts of one request, reports that came in between), all eligible ones: an admitted
        request is not refused later."""
        pods = eligible(service.pods.values(), now)
        return self._unsaturated(service, pods, now) or pods

    def with_capacity(self, service: Service, now: float) -> list[Pod]:
        """Return the eligible pods with capacity for another request."""
        return self._unsaturated(service, eligible(service.pods.values(), now), now)

    def saturated(self, service: Service, now: float) -> bool:
        """Return whether no pod has spare capacity."""
        return self._capacity(self._state_of(service), now, enough=1) < 1

    def changed(self, service: Service) -> None:
        """Check the queue once, soon: there may be new capacity. Cheap; call it freely."""
        state = self._states.get(service)
        if state is not None and len(state.queue) and not state.check_soon:
            state.check_soon = True
            asyncio.get_running_loop().call_soon(self._check_queue, state)

    def forget(self, service: Service) -> None:
        """Drop a service that is gone, and refuse the requests that wait for it."""
        state = self._states.pop(service, None)
        if state is not None:
            self._refuse_all(state, NoPods("the service was removed", code="no_pods"))

    def waiting(self, service: Service, class_name: str | None = None) -> int:
        """Return the number of queued requests, of one class or of all."""
        state = self._states.get(service)
        if state is None:
            return 0
        return len(state.queue) if class_name is None else state.queue.waiting(class_name)

    def pending(self, service: Service) -> int:
        """Return the number of admitted requests that have no lease yet."""
        state = self._states.get(service)
        return state.pending if state else 0

    def stats(self, service: Service) -> AdmissionStats:
        return self._state_of(service).stats

    # -- inside ----------------------------------------------------------------------------------------------

    def _state_of(self, service: Service) -> ServiceAdmission:
        state = self._states.get(service)
        if state is None:
            state = self._states[service] = ServiceAdmission(service, self.config)
        return state

    def _ask(self, admittance: Admittance) -> bool:
        state, now = admittance._state, time.monotonic()
        admittance._held_from = now
        if (
            (admittance._deadline is None or now < admittance._deadline)
            and not len(state.queue)
            and self._capacity(state, now, enough=1) > 0
        ):
            self._admit(admittance, now)
            return True
        refusal = self._verdict(admittance, now)
        if refusal is not None:
            raise _counted(state, refusal)
        return False

    async def _wait(self, admittance: Admittance) -> None:
        state, now = admittance._state, time.monotonic()
        self._queue(admittance, now)
        turn = admittance._turn
        assert turn is not None
        try:
            await turn
        except asyncio.CancelledError:
            # The client left. If it was admitted at the same time, the next request gets its capacity.
            if state.queue.remove(admittance) or admittance._pending:
                state.stats.cancelled += 1
            elif turn.done() and not turn.cancelled():
                turn.exception()  # refused at the same time; asyncio would call the error forgotten
            admittance.routed()
            self.changed(state.service)
            raise
        finally:
            if admittance._timer is not None:
                admittance._timer.cancel()
                admittance._timer = None
            admittance._turn = None

    def _admit(self, admittance: Admittance, now: float) -> None:
        state = admittance._state
        admittance._pending = True
        state.pending += 1
        state.rate.one(now)
        state.stats.admitted += 1

    def _queue(self, admittance: Admittance, now: float) -> None:
        state = admittance._state
        if len(state.queue) >= self.config.max_queued:
            # One tenant's flood must not shut out the others: the longest queue gives way.
            victim = state.queue.to_shed(admittance._class, admittance._tenant)
            full = QueueFull(
                f"{len(state.queue)} requests wait for {state.service.name} already",
                code="queue_full",
                retry_after=state.rate.retry_after(len(state.queue) + 1, now),
            )
            if victim is None:
                raise _counted(state, full)
            state.queue.remove(victim)
            self._refuse(victim, full)
        loop = asyncio.get_running_loop()
        admittance._turn = loop.create_future()
        state.queue.push(admittance, admittance._class, admittance._tenant, admittance._cost)
        state.stats.queued += 1
        self._set_timer(admittance, now)
        if state.tick is None:
            state.tick = loop.call_later(TICK, self._ticked, state)

    def _check_queue(self, state: ServiceAdmission) -> None:
        """Admit as many requests as there is capacity for."""
        state.check_soon = False
        if not len(state.queue):
            return
        now = time.monotonic()
        free = self._capacity(state, now, enough=len(state.queue))
        while free > 0 and (admittance := state.queue.pop()) is not None:
            turn = admittance._turn
            if turn is None or turn.done():  # cancelled, and its task has not run yet
                state.stats.cancelled += 1
                continue
            free -= 1
            self._admit(admittance, now)
            admittance.waited_seconds = now - admittance._held_from
            state.stats.waited_seconds += admittance.waited_seconds
            turn.set_result(None)

    def _ticked(self, state: ServiceAdmission) -> None:
        state.tick = None
        if _cannot_wake(state.service) and not eligible(state.service.pods.values(), time.monotonic()):
            self._refuse_all(state, self._no_pods(state, time.monotonic()))
        self._check_queue(state)
        if len(state.queue):
            state.tick = asyncio.get_running_loop().call_later(TICK, self._ticked, state)

    def _capacity(self, state: ServiceAdmission, now: float, enough: int) -> int:
        """Return the number of requests that can be admitted; the count stops at `enough`."""
        concurrency, pod_queue = state.service.pod_concurrency, self.config.pod_queue
        left = -state.pending
        for pod in state.service.pods.values():
            if pod.ready and not pod.draining and pod.circuit.allows(now):
                left += spare_capacity(pod, now, concurrency=concurrency, pod_queue=pod_queue)
                if left >= enough:
                    return enough
        return left

    def _unsaturated(self, service: Service, pods: list[Pod], now: float) -> list[Pod]:
        return unsaturated(pods, now, concurrency=service.pod_concurrency, pod_queue=self.config.pod_queue)

    # Refusals

    def _set_timer(self, admittance: Admittance, now: float) -> None:
        """Wake up at the next moment at which `_verdict` may change."""
        start = admittance._held_from
        times = [start + admittance._queue_timeout, start + self._hold(admittance._state.service)]
        if admittance._deadline is not None:
            times.append(admittance._deadline)
        # The last resort covers a timer that fired early: loops round times to milliseconds.
        delay = min((moment - now for moment in times if moment > now), default=0.002)
        admittance._timer = asyncio.get_running_loop().call_later(delay, self._expired, admittance)

    def _expired(self, admittance: Admittance) -> None:
        if admittance not in admittance._state.queue:
            return
        now = time.monotonic()
        error = self._verdict(admittance, now)
        if error is None:
            self._set_timer(admittance, now)
        else:
            admittance._state.queue.remove(admittance)
            self._refuse(admittance, error)

    def _verdict(self, admittance: Admittance, now: float) -> GatewayRefusal | None:
        """Return why the request may wait no longer, or None if it may."""
        state = admittance._state
        waited = now - admittance._held_from
        if admittance._deadline is not None and now >= admittance._deadline:
            return DeadlinePassed(
                "the request's deadline passed before a pod had room", code="deadline_exceeded"
            )
        late = waited >= admittance._queue_timeout
        hopeless = late or waited >= self._hold(state.service) or _cannot_wake(state.service)
        if hopeless and not eligible(state.service.pods.values(), now):
            return self._no_pods(state, now)
        if late:
            return QueueTimeout(
                f"no pod of {state.service.name} had room within {admittance._queue_timeout:g} s",
                code="queue_timeout",
                retry_after=state.rate.retry_after(len(state.queue), now),
            )
        return None

    def _no_pods(self, state: ServiceAdmission, now: float) -> NoPods:
        return NoPods(
            state.service.without_pods(),
            code="no_pods",
            retry_after=max(_NO_PODS_RETRY, state.rate.retry_after(len(state.queue), now)),
        )

    def _hold(self, service: Service) -> float:
        """Seconds for which a request waits for a first pod."""
        return max(self.config.hold_without_pods_seconds, service.wake_seconds)

    def _refuse_all(self, state: ServiceAdmission, error: GatewayRefusal) -> None:
        """Refuse all requests that wait for a service."""
        while (admittance := state.queue.pop()) is not None:
            self._refuse(admittance, error)

    def _refuse(self, admittance: Admittance, error: GatewayRefusal) -> None:
        """Wake a request that has left the queue already, with an error."""
        turn = admittance._turn
        if turn is not None and not turn.done():
            turn.set_exception(_counted(admittance._state, error))


def _cannot_wake(service: Service) -> bool:
    """Whether a service that sleeps without requests has no way to get a pod."""
    return bool(service.wake_seconds) and service.stuck


def _counted(state: ServiceAdmission, error: GatewayRefusal) -> GatewayRefusal:
    refused = state.stats.refused
    code = error.code or "refused"
    refused[code] = refused.get(code, 0) + 1
    return error
