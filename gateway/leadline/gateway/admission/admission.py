"""The door of every service: lets a request in, makes it wait its turn, or refuses it.

Room: gateway/admission. Lives on one event loop.

    async with admission.enter(service, principal, deadline, cost) as ticket:
        decision = policy.pick(request, admission.candidates(service, now))
        with decision.pod.lease(…):
            ticket.routed()          from here on the lease counts, not the ticket
            …                        retries and migrations need no new ticket
    # leaving the block lets the next one in

Who is let in at once: everybody, as long as nobody waits and some pod has room (capacity.py). Else requests
wait in fair order (fair_queue.py). A queue is looked at when a ticket ends, when `changed` is called (a
report, a pod that came or went, a circuit that closed), and every `TICK` while anybody waits, for what
changes by time alone (a circuit opens for a probe, a report goes stale).

A service that sleeps without requests (`autoscaling.min: 0`) gets a pod because a request waits here: the
operator reads how many do. Such a request waits up to `wakeSeconds`, or until the operator says that no pod
can come.

Invariants (P16): a request holds room from being let in until its lease is counted or its ticket ends,
whatever happens, cancellation in the very moment of being let in included; `pending` and `waiting` return
to 0.
"""

import asyncio
import time

from leadline.gateway.admission.capacity import room, unsaturated
from leadline.gateway.admission.door import AdmissionStats, Client, Door, Ticket
from leadline.gateway.config import AdmissionConfig
from leadline.gateway.errors import DeadlinePassed, GatewayRefusal, NoPods, QueueFull, QueueTimeout
from leadline.gateway.pods import Pod, eligible
from leadline.gateway.services import Service

__all__ = ["TICK", "Admission", "AdmissionStats", "Client", "Ticket"]

TICK = 0.1
"""Seconds between looks at a queue in which somebody waits."""
_NO_PODS_RETRY = 5.0
"""A pod takes its time to start."""


class Admission:
    """Doors of all services."""

    def __init__(self, config: AdmissionConfig | None = None) -> None:
        self.config = config or AdmissionConfig()
        self._doors: dict[Service, Door] = {}

    def enter(
        self,
        service: Service,
        client: Client,
        deadline: float | None = None,
        cost: float = 1,
        *,
        patience: float | None = None,
    ) -> Ticket:
        """A context that is entered once the request may be sent on.

        `deadline`: monotonic seconds after which the client does not want an answer. `cost`: what it counts
        for in fairness; expected tokens, prompt and output. `patience`: seconds that the client is ready to
        wait, if less than the configured queue timeout; 0: only if there is room now. Entering raises
        QueueFull (429), QueueTimeout and NoPods (503), all with `retry_after`, and DeadlinePassed (504).
        """
        limit = self.config.queue_timeout_seconds
        if service.wake_seconds > limit and not eligible(service.pods.values(), time.monotonic()):
            limit = service.wake_seconds
        if patience is not None and patience < limit:
            limit = patience
        return Ticket(self, self._door(service), client, deadline, cost, limit)

    def candidates(self, service: Service, now: float) -> list[Pod]:
        """Pods for a policy to pick from: eligible ones with room. If none has (several attempts of one
        request, reports that came in between), all eligible ones: whoever was let in is not sent away
        again."""
        pods = eligible(service.pods.values(), now)
        return self._unsaturated(service, pods, now) or pods

    def with_room(self, service: Service, now: float) -> list[Pod]:
        """Eligible pods with capacity for another request."""
        return self._unsaturated(service, eligible(service.pods.values(), now), now)

    def saturated(self, service: Service, now: float) -> bool:
        """No pod has room."""
        return self._room(self._door(service), now, enough=1) < 1

    def changed(self, service: Service) -> None:
        """Something may have made room: look at the queue, once, soon. Cheap; call it freely."""
        door = self._doors.get(service)
        if door is not None and len(door.queue) and not door.look_soon:
            door.look_soon = True
            asyncio.get_running_loop().call_soon(self._look, door)

    def forget(self, service: Service) -> None:
        """The service is gone: refuse whoever waits for it."""
        door = self._doors.pop(service, None)
        if door is not None:
            self._refuse_all(door, NoPods("the service was removed", code="no_pods"))

    def waiting(self, service: Service, class_name: str | None = None) -> int:
        """Requests in the queue, of one class or of all."""
        door = self._doors.get(service)
        if door is None:
            return 0
        return len(door.queue) if class_name is None else door.queue.waiting(class_name)

    def pending(self, service: Service) -> int:
        """Requests that were let in and have no lease yet."""
        door = self._doors.get(service)
        return door.pending if door else 0

    def stats(self, service: Service) -> AdmissionStats:
        return self._door(service).stats

    # -- inside ----------------------------------------------------------------------------------------------

    def _door(self, service: Service) -> Door:
        door = self._doors.get(service)
        if door is None:
            door = self._doors[service] = Door(service, self.config)
        return door

    def _ask(self, ticket: Ticket) -> bool:
        door, now = ticket._door, time.monotonic()
        ticket._held_from = now
        if (
            (ticket._deadline is None or now < ticket._deadline)
            and not len(door.queue)
            and self._room(door, now, enough=1) > 0
        ):
            self._let_in(ticket, now)
            return True
        refusal = self._verdict(ticket, now)
        if refusal is not None:
            raise _counted(door, refusal)
        return False

    async def _wait(self, ticket: Ticket) -> None:
        door, now = ticket._door, time.monotonic()
        self._queue(ticket, now)
        turn = ticket._turn
        assert turn is not None
        try:
            await turn
        except asyncio.CancelledError:
            # The client left. It may have been let in at the same time: then the next one gets its place.
            if door.queue.remove(ticket) or ticket._pending:
                door.stats.cancelled += 1
            elif turn.done() and not turn.cancelled():
                turn.exception()  # refused at the same time; asyncio would call the error forgotten
            ticket.routed()
            self.changed(door.service)
            raise
        finally:
            if ticket._timer is not None:
                ticket._timer.cancel()
                ticket._timer = None
            ticket._turn = None

    def _let_in(self, ticket: Ticket, now: float) -> None:
        door = ticket._door
        ticket._pending = True
        door.pending += 1
        door.rate.one(now)
        door.stats.admitted += 1

    def _queue(self, ticket: Ticket, now: float) -> None:
        door = ticket._door
        if len(door.queue) >= self.config.max_queued:
            # One tenant's flood must not shut out the others: the longest queue gives way.
            victim = door.queue.to_shed(ticket._class, ticket._tenant)
            full = QueueFull(
                f"{len(door.queue)} requests wait for {door.service.name} already",
                code="queue_full",
                retry_after=door.rate.retry_after(len(door.queue) + 1, now),
            )
            if victim is None:
                raise _counted(door, full)
            door.queue.remove(victim)
            self._refuse(victim, full)
        loop = asyncio.get_running_loop()
        ticket._turn = loop.create_future()
        door.queue.push(ticket, ticket._class, ticket._tenant, ticket._cost)
        door.stats.queued += 1
        self._set_timer(ticket, now)
        if door.tick is None:
            door.tick = loop.call_later(TICK, self._ticked, door)

    def _look(self, door: Door) -> None:
        """Let in as many as there is room for."""
        door.look_soon = False
        if not len(door.queue):
            return
        now = time.monotonic()
        free = self._room(door, now, enough=len(door.queue))
        while free > 0 and (ticket := door.queue.pop()) is not None:
            turn = ticket._turn
            if turn is None or turn.done():  # cancelled, and its task has not run yet
                door.stats.cancelled += 1
                continue
            free -= 1
            self._let_in(ticket, now)
            ticket.waited_seconds = now - ticket._held_from
            door.stats.waited_seconds += ticket.waited_seconds
            turn.set_result(None)

    def _ticked(self, door: Door) -> None:
        door.tick = None
        if _cannot_wake(door.service) and not eligible(door.service.pods.values(), time.monotonic()):
            self._refuse_all(door, self._no_pods(door, time.monotonic()))
        self._look(door)
        if len(door.queue):
            door.tick = asyncio.get_running_loop().call_later(TICK, self._ticked, door)

    def _room(self, door: Door, now: float, enough: int) -> int:
        """Requests that can be let in; the count stops at `enough`."""
        concurrency, pod_queue = door.service.pod_concurrency, self.config.pod_queue
        left = -door.pending
        for pod in door.service.pods.values():
            if pod.ready and not pod.draining and pod.circuit.allows(now):
                left += room(pod, now, concurrency=concurrency, pod_queue=pod_queue)
                if left >= enough:
                    return enough
        return left

    def _unsaturated(self, service: Service, pods: list[Pod], now: float) -> list[Pod]:
        return unsaturated(pods, now, concurrency=service.pod_concurrency, pod_queue=self.config.pod_queue)

    # Refusals

    def _set_timer(self, ticket: Ticket, now: float) -> None:
        """Wake up at the next moment at which `_verdict` may say something else."""
        start = ticket._held_from
        times = [start + ticket._patience, start + self._hold(ticket._door.service)]
        if ticket._deadline is not None:
            times.append(ticket._deadline)
        # The last resort covers a timer that fired early: loops round times to milliseconds.
        delay = min((moment - now for moment in times if moment > now), default=0.002)
        ticket._timer = asyncio.get_running_loop().call_later(delay, self._expired, ticket)

    def _expired(self, ticket: Ticket) -> None:
        if ticket not in ticket._door.queue:
            return
        now = time.monotonic()
        error = self._verdict(ticket, now)
        if error is None:
            self._set_timer(ticket, now)
        else:
            ticket._door.queue.remove(ticket)
            self._refuse(ticket, error)

    def _verdict(self, ticket: Ticket, now: float) -> GatewayRefusal | None:
        """Why the ticket may wait no longer; None: it may."""
        door = ticket._door
        waited = now - ticket._held_from
        if ticket._deadline is not None and now >= ticket._deadline:
            return DeadlinePassed(
                "the request's deadline passed before a pod had room", code="deadline_exceeded"
            )
        late = waited >= ticket._patience
        hopeless = late or waited >= self._hold(door.service) or _cannot_wake(door.service)
        if hopeless and not eligible(door.service.pods.values(), now):
            return self._no_pods(door, now)
        if late:
            return QueueTimeout(
                f"no pod of {door.service.name} had room within {ticket._patience:g} s",
                code="queue_timeout",
                retry_after=door.rate.retry_after(len(door.queue), now),
            )
        return None

    def _no_pods(self, door: Door, now: float) -> NoPods:
        return NoPods(
            door.service.without_pods(),
            code="no_pods",
            retry_after=max(_NO_PODS_RETRY, door.rate.retry_after(len(door.queue), now)),
        )

    def _hold(self, service: Service) -> float:
        """Seconds for which a request waits for a first pod."""
        return max(self.config.hold_without_pods_seconds, service.wake_seconds)

    def _refuse_all(self, door: Door, error: GatewayRefusal) -> None:
        """Refuse everybody who waits at a door."""
        while (ticket := door.queue.pop()) is not None:
            self._refuse(ticket, error)

    def _refuse(self, ticket: Ticket, error: GatewayRefusal) -> None:
        """Wake a ticket that is out of the queue already, with an error."""
        turn = ticket._turn
        if turn is not None and not turn.done():
            turn.set_exception(_counted(ticket._door, error))


def _cannot_wake(service: Service) -> bool:
    """Whether a service that sleeps without requests has no way to get a pod."""
    return bool(service.wake_seconds) and service.stuck


def _counted(door: Door, error: GatewayRefusal) -> GatewayRefusal:
    refused = door.stats.refused
    code = error.code or "refused"
    refused[code] = refused.get(code, 0) + 1
    return error
