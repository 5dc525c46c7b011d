"""Sends a request to a pod, and to the next pod when that does not work. An attempt is one request on one
pod.

    pick ─▶ lease ─▶ index.routed ─▶ send ─▶ status ─▶ first piece of the body ─▶ the relay has it
      ▲                                │        │           │
      └── another pod ◀── lost, timeout, hangs ─┴─ 429, 502, 503, 504, 529

Until the first piece is handed over nothing has been sent to the client, so another pod may be tried (P14).
After that relay.py decides.
"""

import logging
import time
from collections.abc import Callable

from leadline.gateway.admission.admission import Admission, Admittance
from leadline.gateway.errors import DeadlinePassed, NoPods
from leadline.gateway.pods import Pod
from leadline.gateway.proxy.forwarding import header, request_for
from leadline.gateway.request.context import Call
from leadline.gateway.request.prompt import choose
from leadline.gateway.upstream.breaker import breaker_of
from leadline.gateway.upstream.capability import Capabilities
from leadline.gateway.upstream.connection import (
    ConnectFailed,
    Connection,
    Pool,
    UpstreamError,
    UpstreamLost,
    UpstreamTimeout,
)
from leadline.gateway.upstream.hang_detector import HangDetector
from leadline.gateway.upstream.settings import ProxySettings
from leadline.protocol.errors import SHOULD_RETRY, RequestError
from leadline.protocol.http.deadlines import Deadlines

__all__ = ["ELSEWHERE", "Attempt", "BadGateway", "Dispatcher", "GatewayTimeout"]


logger = logging.getLogger("leadline.gateway")


class Attempt:
    """One request on one pod: its lease, its part in the pod's circuit, its connection, the answer so far.

    An attempt opens a lease and takes the breaker's permission; `close` gives back both, and the connection,
    exactly once (P16).
    """

    __slots__ = (
        "_breaker",
        "_closed",
        "_verdict",
        "body",
        "connection",
        "elsewhere",
        "headers",
        "lease",
        "movable",
        "pod",
        "status",
        "stream",
    )

    def __init__(self, pod: Pod, settings: ProxySettings, prefill: int, blocks: int) -> None:
        self.pod = pod
        self.connection: Connection | None = None
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        """What has come of the answer's body and was not passed on."""
        self.movable = False
        """The pod was asked for what it takes to go on with its stream elsewhere."""
        self.stream = False
        """The answer is a stream of events; else `body` is all of it, unless the connection has more."""
        self.elsewhere: Callable[[], bool] | None = None
        """Whether another pod could be asked instead; None: no."""
        self._breaker = breaker_of(pod, settings)
        self._verdict = False
        self._closed = False
        self._breaker.begin()
        self.lease = pod.lease(prefill_tokens=prefill, blocks=blocks, now=time.monotonic())

    def succeeded(self) -> None:
        self._verdict = True
        self._breaker.succeeded()

    def failed(self) -> None:
        self.pod.resumes = None  # another engine may come up in its place
        if not self._verdict:
            self._verdict = True
            if self._breaker.failed(time.monotonic()):
                logger.warning("circuit of pod %s opened", self.pod.id)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.lease.close()
        if not self._verdict:
            self._breaker.abandoned()
        if self.connection is not None:
            self.connection.release()
            self.connection = None


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
        self._hangs = HangDetector(settings, self.pool)
        self.wait_for = self._hangs.wait

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
        self._hangs.forget(gone)

    def close(self) -> None:
        self._hangs.close()
        self.forget(set())
        self.deadlines.close()

    async def answer(
        self,
        call: Call,
        *,
        admittance: Admittance | None = None,
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
            pods = self.admission.with_capacity(call.service, time.monotonic())
            return any(pod.id not in tried for pod in pods)

        for number in range(self.settings.max_attempts):
            pods = self.admission.candidates(call.service, time.monotonic())
            candidates = [pod for pod in pods if pod.id not in tried] if tried else pods
            if not candidates:
                break
            if number and call.deadline is not None and time.monotonic() >= call.deadline:
                break
            attempt = self._open(call, candidates)
            if admittance is not None:
                admittance.routed()
            tried.add(attempt.pod.id)
            if number + 1 < self.settings.max_attempts:
                attempt.elsewhere = elsewhere
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
        while piece := await self.wait_for(connection.read, attempt.pod, until, elsewhere=attempt.elsewhere):
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
                await self.wait_for(connection.answered, attempt.pod, until, elsewhere=attempt.elsewhere)
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
        """Tell the breaker what the status means for the pod. Returns the reason to try another pod, or
        None."""
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
