"""The hot path: requests of the generation APIs (DIALECTS), from an Exchange to its answer.

    key ▶ body (413, 400) ▶ service (404) ▶ prompt ▶ limits (429) ▶ admission (429, 503, 504) ▶ attempts ▶
    relay

There is no framework here, because its request, response and middleware objects cost more than all our work.
Steps that can be done at once are plain calls, because a coroutine that never waits costs as much as its
work. Every error that a client can cause becomes an answer here, in the shape of the path's API; every
request is counted here once, on every path.

A client that leaves (P9): its connection cancels the request's task, and the `finally` blocks on the way out
drop the pod's connection, close the lease and leave the queue.
"""

import asyncio
import logging
import random
import time

from leadline.gateway.access.keys import KeyRing
from leadline.gateway.access.limits import RateLimits
from leadline.gateway.access.principal import Principal
from leadline.gateway.admission.admission import Admission
from leadline.gateway.errors import shutting_down
from leadline.gateway.metrics.metrics import GatewayMetrics
from leadline.gateway.proxy.access_log import AccessLog
from leadline.gateway.proxy.dispatcher import Dispatcher
from leadline.gateway.proxy.forwarding import header
from leadline.gateway.proxy.relay import relay
from leadline.gateway.proxy.tracing import Tracing
from leadline.gateway.request.body import amended
from leadline.gateway.request.context import Call
from leadline.gateway.request.dialects import DIALECTS
from leadline.gateway.request.prompt import expected_tokens, known_prompt, read_prompt
from leadline.gateway.services import ServiceTable
from leadline.gateway.stored_responses import ResponseStore
from leadline.gateway.upstream.settings import ProxySettings
from leadline.protocol.errors import RequestError
from leadline.protocol.http.answers import InternalError, answer_to
from leadline.protocol.http.exchange import ClientGone, Exchange
from leadline.protocol.http.headers import NAME, authorization_of, request_id
from leadline.protocol.openai.other_servers import OtherServersFields

__all__ = ["ProxyHandler"]

logger = logging.getLogger("leadline.gateway")

Headers = list[tuple[bytes, bytes]]


class ProxyHandler:
    """One an event loop. Called with an exchange for a path of DIALECTS."""

    def __init__(
        self,
        *,
        table: ServiceTable,
        admission: Admission,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        settings: ProxySettings,
        keys: KeyRing,
        limits: RateLimits,
        responses: ResponseStore,
        access_log: AccessLog | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._table = table
        self._admission = admission
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._settings = settings
        self._keys = keys
        self._limits = limits
        self._responses = responses
        self._access_log = access_log
        self._tracing = tracing
        self._rng = random.Random()
        self.in_flight = 0

    async def __call__(self, exchange: Exchange) -> None:
        record = RequestRecord(time.monotonic(), exchange.headers)
        self.in_flight += 1
        try:
            await self._serve(exchange, record)
        except RequestError as error:
            record.status = error.status
            if not exchange.started:
                _error_answer(error, exchange, record)
        except ClientGone:
            record.status = 499
        except asyncio.CancelledError:
            delivered = record.call is not None and record.call.delivered
            record.status = 0 if delivered else 499
            if not exchange.gone:  # the server stops, and its shutdown timeout has passed
                record.status = 0 if delivered else 503
                if not exchange.started:
                    _error_answer(shutting_down(), exchange, record)
                raise
        except Exception:
            logger.exception("a request failed unexpectedly")
            record.status = 500
            if not exchange.started:
                _error_answer(InternalError(), exchange, record)
        finally:
            if not exchange.finished:
                exchange.drop()
            self.in_flight -= 1
            self._close(exchange, record)

    async def _serve(self, exchange: Exchange, record: "RequestRecord") -> None:
        dialect = DIALECTS[exchange.path]
        authorization = authorization_of(exchange.headers, self._settings.max_body_bytes)
        explain = header(exchange.headers, b"x-leadline-explain") not in (None, b"", b"0", b"false")
        principal = record.principal = self._keys.authenticate(authorization)
        body = await exchange.body(self._settings.max_body_bytes)

        began = time.monotonic()
        if dialect.stored is not None:
            most = self._settings.max_body_bytes
            body = amended(body, **await self._responses.resolve(body, principal.tenant, most))
        incoming = dialect.read(body)
        fields = incoming.fields
        service = self._table.resolve(fields.model, self._rng)
        principal.require_service(fields.model, service)
        deadline = None if fields.deadline is None else record.arrived + fields.deadline
        metrics = self._metrics.service(service.name)
        prompt = known_prompt(service, incoming) or await read_prompt(service, incoming)
        caller = _Caller(principal, fields.priority_class)
        call = record.call = Call(
            path=exchange.target,
            dialect=dialect,
            headers=record.headers,
            extra_headers=record.extra_headers,
            client=exchange.client,
            incoming=incoming,
            service=service,
            metrics=metrics,
            prompt=prompt,
            arrived=record.arrived,
            explain=explain,
            deadline=deadline,
            batch=caller.priority_class == "batch" != fields.priority_class,
            seed=self._rng.getrandbits(63) if incoming.resumable else None,
            identity=dialect.identity() if incoming.resumable else {},
        )
        if dialect.stored is not None:
            call.keep = self._responses.keeper(body, principal.tenant)
        metrics.began()
        spent = time.monotonic() - began
        if self._tracing is not None:
            self._tracing.start(call)
        estimate = expected_tokens(service, incoming, prompt)
        record.estimated = estimate if dialect.local is None else 0
        if self._limits.apply_to(principal):
            limits = await self._limits.take(principal, record.estimated)
            record.extra_headers += [
                (name.lower().encode(), value.encode()) for name, value in limits.items()
            ]
        record.taken = True
        if (
            dialect.local is not None
            and (answer := await dialect.local(service, incoming, prompt)) is not None
        ):
            call.status = 200
            if isinstance(incoming.request, OtherServersFields):
                record.extra_headers += [
                    (name.lower().encode(), value.encode())
                    for name, value in incoming.request.skipped_header.items()
                ]
            exchange.answer(200, [(b"content-type", b"application/json"), *record.extra_headers], answer)
            return
        queue_timeout = fields.queue_timeout
        admittance = self._admission.enter(service, caller, deadline, estimate, queue_timeout=queue_timeout)
        if not admittance.try_enter():
            await admittance.wait()
            metrics.queued.observe(admittance.waited_seconds)
            if queue_timeout is not None:
                call.queue_timeout = max(0.0, queue_timeout - admittance.waited_seconds)
        try:
            attempt = await self._dispatcher.answer(call, admittance=admittance)
            metrics.routing.observe(spent + call.picking_seconds)
            await relay(self._dispatcher, call, attempt, exchange)
        finally:
            admittance.leave()

    def _close(self, exchange: Exchange, record: "RequestRecord") -> None:
        call = record.call
        if call is None:
            self._metrics.service("").ended(record.status)
        else:
            if record.status:
                call.status = record.status
            call.close()
            principal = record.principal
            if record.taken and principal is not None:
                self._settle(call, principal, record.estimated)
            if self._tracing is not None:
                self._tracing.end(call)
        if self._access_log is not None:
            self._access_log.write(
                exchange, record.request_id, record.arrived, record.status, call, record.principal
            )

    def _settle(self, call: Call, principal: Principal, estimated: int) -> None:
        """Put what the key was charged right. Failures cost nothing; a client that leaves has had what went
        to it, and the prompt if a pod was asked."""
        total = call.total_tokens
        if call.status == 499 and total is None:
            total = call.prompt.tokens if call.attempts else 0
        elif call.status >= 400 and call.status != 499:
            total = 0
        if total is not None and total != estimated:
            self._limits.settle(principal, total - estimated)


class RequestRecord:
    """Per-request data for metrics and the access log."""

    __slots__ = (
        *("arrived", "call", "estimated", "extra_headers", "headers", "principal", "request_id", "status"),
        "taken",
    )

    def __init__(self, arrived: float, headers: Headers) -> None:
        self.arrived = arrived
        self.request_id, self.headers = request_id(headers)
        """The headers as pods get them."""
        self.status = 0
        """Where it did not end with a pod's answer."""
        self.call: Call | None = None
        self.principal: Principal | None = None
        self.extra_headers: Headers = [(NAME, self.request_id)]
        self.estimated = 0
        self.taken = False


class _Caller:
    """The caller and its effective priority class: the key's, or the request's if lower."""

    __slots__ = ("priority_class", "tenant")

    def __init__(self, principal: Principal, asked: str | None) -> None:
        self.tenant = principal.tenant
        self.priority_class = "batch" if asked == "batch" else principal.priority_class


def _error_answer(error: RequestError, exchange: Exchange, record: RequestRecord) -> None:
    """Answer with an error in the shape of the path's API, with its field names."""
    error = DIALECTS[exchange.path].worded(error)
    record.status, headers, body = answer_to(error, exchange.path, record.request_id)
    exchange.answer(record.status, headers + record.extra_headers, body)
