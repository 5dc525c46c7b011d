"""Attempts: one request on one pod, and the choice of the next pod when that did not work.

    pick ─▶ lease ─▶ index.routed ─▶ send ─▶ status ─▶ first piece of the body ─▶ the relay has it
      ▲                                │        │           │
      └── another pod ◀── lost, timeout, hangs ─┴─ 429, 502, 503, 504, 529

Room: gateway/proxy. Until the first piece is handed over nothing has gone to the client, so another pod may
be tried (P14); after that only relay.py can say what may be done.
"""

import asyncio
import logging
import time

from leadline.gateway.admission.admission import Admission, Ticket
from leadline.gateway.errors import DeadlinePassed, NoPods
from leadline.gateway.pods import Pod
from leadline.gateway.proxy.attempt import Attempt
from leadline.gateway.proxy.call import Call
from leadline.gateway.proxy.capability import Capabilities
from leadline.gateway.proxy.headers import header
from leadline.gateway.proxy.outgoing import request_for
from leadline.gateway.proxy.patience import Patience
from leadline.gateway.proxy.pool import Pool
from leadline.gateway.proxy.routing import choose
from leadline.gateway.proxy.settings import ProxySettings
from leadline.gateway.proxy.upstream import (
    ConnectFailed,
    Connection,
    UpstreamError,
    UpstreamLost,
    UpstreamTimeout,
)
from leadline.protocol.errors import SHOULD_RETRY, RequestError
from leadline.protocol.http.deadlines import Deadlines

__all__ = ["ELSEWHERE", "BadGateway", "Dispatcher", "GatewayTimeout"]

logger = logging.getLogger("leadline.gateway")

ELSEWHERE = frozenset((429, 502, 503, 504, 529))
"""Statuses that another pod may not answer, nor this one a moment later."""
_SICK = frozenset((500, 502, 504))
_HELD_BODY = 16 << 20
"""Answers that are no streams are held back up to this size, so that a pod that dies can be replaced."""


class BadGateway(RequestError):
    """No pod could be reached, or none kept its connection."""

    status = 502
    type = "server_error"


class GatewayTimeout(RequestError):
    """No pod answered in time."""

    status = 504
    type = "server_error"


class Dispatcher:
    """Sends calls to pods. Holds the connection pools; one an event loop."""

    def __init__(self, settings: ProxySettings, admission: Admission) -> None:
        self.settings = settings
        self.admission = admission
        self.deadlines = Deadlines()
        """Of the connections to pods."""
        self._pools: dict[str, Pool] = {}
        self._capabilities = Capabilities(self.pool)
        self._patience = Patience(settings, self.pool)
        self.patiently = self._patience.wait

    def pool(self, address: str) -> Pool:
        pool = self._pools.get(address)
        if pool is None:
            pool = self._pools[address] = Pool(
                address, self.deadlines, connect_seconds=self.settings.connect_timeout
            )
        return pool

    def forget(self, pods: set[str]) -> None:
        """Close the pools of addresses that no pod has any more."""
        gone = set(self._pools) - pods
        for address in gone:
            self._pools.pop(address).close()
        self._capabilities.forget(gone)
        self._patience.forget(gone)

    def close(self) -> None:
        self._patience.close()
        self.forget(set())
        self.deadlines.close()

    async def answer(
        self,
        call: Call,
        *,
        ticket: Ticket | None = None,
        extra: dict[str, object] | None = None,
        avoid: set[str] | None = None,
    ) -> Attempt:
        """The attempt that answers: with a status that is the client's, and the first piece of the body (all
        of it, if it is no stream). Raises RequestError when all attempts are used up.

        `extra`: fields for the body, of a stream that goes on. `avoid`: pods that are no use.
        """
        tried = set(avoid or ())
        refusal: Attempt | None = None
        problem: UpstreamError | None = None

        def elsewhere() -> bool:
            pods = self.admission.with_room(call.service, time.monotonic())
            return any(pod.id not in tried for pod in pods)

        for number in range(self.settings.max_attempts):
            pods = self.admission.candidates(call.service, time.monotonic())
            candidates = [pod for pod in pods if pod.id not in tried] if tried else pods
            if not candidates:
                break
            if number and call.deadline is not None and time.monotonic() >= call.deadline:
                break
            attempt = self._open(call, candidates)
            if ticket is not None:
                ticket.routed()
            tried.add(attempt.pod.id)
            if number + 1 < self.settings.max_attempts:
                attempt.elsewhere = elsewhere
            hedge = self.settings.hedge_after if not number else 0.0
            if hedge:
                attempt, outcome = await self._hedged(call, attempt, extra or {}, tried, hedge)
            else:
                outcome = await self._run(call, attempt, extra or {})
            if outcome is None:
                return attempt
            if isinstance(outcome, UpstreamError):
                problem = outcome
                call.metrics.retried(_reason_of(outcome))
            else:
                refusal = attempt
                call.metrics.retried(outcome)
        if refusal is not None:
            return refusal
        raise self._nothing(call, problem)

    # -- inside ----------------------------------------------------------------------------------------------

    def _open(self, call: Call, candidates: list[Pod]) -> Attempt:
        service, prompt = call.service, call.prompt
        began = time.monotonic()
        decision, chain, held = choose(service, call.incoming, prompt, candidates, explain=call.explain)
        call.decision = decision
        call.attempts += 1
        pod, matched = decision.pod, decision.picked.matched_tokens
        call.predicted = matched if prompt.exact else 0
        now = time.monotonic()
        if chain:
            # Where pods do not say what they hold, each request renews what is believed of its pod.
            events = prompt.exact and service.index.fresh(now)
            service.index.routed(pod.id, chain, held if events else 0, now)
        call.picking_seconds += now - began
        missing = max(0, prompt.tokens - matched)
        # Last, so that nothing can fail between opening the lease and handing over what closes it.
        return Attempt(pod, self.settings, missing, -(-missing // service.block_size))

    async def _run(
        self, call: Call, attempt: Attempt, extra: dict[str, object]
    ) -> UpstreamError | str | None:
        """None if the attempt answers; else it is closed, and this is why to go elsewhere."""
        try:
            reason = await self._try(call, attempt, extra)
        except UpstreamError as error:
            attempt.failed()
            attempt.close()
            logger.info("pod %s: %s", attempt.pod.id, error)
            return error
        except BaseException:
            attempt.close()
            raise
        if reason is not None:
            attempt.close()
        return reason

    async def _hedged(
        self, call: Call, attempt: Attempt, extra: dict[str, object], tried: set[str], delay: float
    ) -> tuple[Attempt, UpstreamError | str | None]:
        """Like `_run`, with a rival on another pod after `delay` seconds: the attempt that answers first, or,
        if none does, the one that failed last. The other is closed, which tells its pod to stop."""
        routed = {attempt: (call.decision, call.predicted)}
        racers = {asyncio.ensure_future(self._run(call, attempt, extra)): attempt}
        try:
            done, _ = await asyncio.wait(racers, timeout=delay)
            pods = [
                pod
                for pod in self.admission.candidates(call.service, time.monotonic())
                if pod.id not in tried
            ]
            if not done and pods:
                rival = self._open(call, pods)
                tried.add(rival.pod.id)
                routed[rival] = (call.decision, call.predicted)
                racers[asyncio.ensure_future(self._run(call, rival, extra))] = rival
                call.metrics.retried("hedge")
            while True:
                done, _ = await asyncio.wait(racers, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    ended, outcome = racers.pop(task), task.result()
                    if outcome is None or not racers:
                        call.decision, call.predicted = routed[ended]
                        return ended, outcome
        finally:
            for task in racers:
                task.cancel()
            await asyncio.gather(*racers, return_exceptions=True)
            for loser in racers.values():
                loser.close()

    async def _try(self, call: Call, attempt: Attempt, extra: dict[str, object]) -> str | None:
        """Why to go elsewhere; None: this is the answer. Raises UpstreamError."""
        settings = self.settings
        pod = attempt.pod
        attempt.movable = bool(extra) or (
            call.incoming.resumable
            and settings.migration == "auto"
            and await self._capabilities.resumes_streams(pod)
        )
        head, body = request_for(call, pod, settings, movable=attempt.movable, extra=extra)
        until = time.monotonic() + (
            settings.first_byte_timeout if call.incoming.stream else settings.answer_timeout
        )
        if call.deadline is not None:
            until = min(until, call.deadline)
        connection = await self._send(attempt, head, body, until)
        status = attempt.status = connection.status
        attempt.headers = connection.headers
        kind = header(attempt.headers, b"content-type") or b""
        attempt.stream = status == 200 and kind.startswith(b"text/event-stream")
        data = connection.taken()
        if not data or not (attempt.stream or connection.complete):
            data = await self._first_of(attempt, connection, data, until)
        attempt.body = data
        attempt.lease.first_token()
        return self._judge(call, attempt, status)

    async def _first_of(self, attempt: Attempt, connection: Connection, data: bytes, until: float) -> bytes:
        """The first piece of a stream; of other answers all, or enough. `data`: what has come of it."""
        pieces, size = [data], len(data)
        while piece := await self.patiently(connection.read, attempt.pod, until, elsewhere=attempt.elsewhere):
            pieces.append(piece)
            size += len(piece)
            if attempt.stream or size > _HELD_BODY:
                break
        return b"".join(pieces)

    async def _send(self, attempt: Attempt, head: bytes, body: bytes, until: float) -> Connection:
        """The connection on which the pod has begun to answer."""
        pool = self.pool(attempt.pod.address)
        connection = pool.idle() or await pool.take(fresh=True)
        while True:
            attempt.connection = connection
            connection.send(head, body)
            try:
                await self.patiently(connection.answered, attempt.pod, until, elsewhere=attempt.elsewhere)
                return connection
            except UpstreamLost:
                # A connection kept alive may have been closed by the pod at the moment we used it.
                stale = connection.used > 1 and not connection.answering
                connection.release()
                attempt.connection = None
                if not stale:
                    raise
            connection = await pool.take(fresh=True)

    def _judge(self, call: Call, attempt: Attempt, status: int) -> str | None:
        """What the status says of the pod, and whether to go elsewhere for it."""
        if status == 529:  # what Anthropic's API has for the 503 of others
            status = 503
        full = status == 503 and header(attempt.headers, b"retry-after") is not None
        late = status == 504 and call.deadline is not None
        own = header(attempt.headers, SHOULD_RETRY.lower().encode()) == b"false"
        if (status in _SICK and not late and not own) or (status == 503 and not full):
            attempt.failed()
        elif status < 500 or own:
            attempt.succeeded()
        if status in ELSEWHERE and not late:
            return f"status_{status}"
        return None

    def _nothing(self, call: Call, problem: UpstreamError | None) -> RequestError:
        if call.deadline is not None and time.monotonic() >= call.deadline:
            return DeadlinePassed("the request's deadline passed", param="deadline", code="deadline_exceeded")
        if problem is None:
            return NoPods(call.service.without_pods(), code="no_pods", retry_after=1.0)
        if isinstance(problem, UpstreamTimeout):
            return GatewayTimeout("no pod answered in time", code="upstream_timeout")
        return BadGateway("no pod could be reached", code="upstream_unreachable")


def _reason_of(error: UpstreamError) -> str:
    if isinstance(error, ConnectFailed):
        return "connect"
    return "timeout" if isinstance(error, UpstreamTimeout) else "lost"
