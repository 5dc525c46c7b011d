"""The hot path: requests of the generation APIs (DIALECTS), from an Exchange to its answer.

    key ▶ body (413, 400) ▶ service (404) ▶ prompt ▶ limits (429) ▶ door (429, 503, 504) ▶ attempts ▶ relay

Room: gateway/proxy. No framework, because its request, response and middleware objects cost more than all we
do; and whatever can be answered at once is a plain call, because a coroutine that never waits costs as much
as what it does. Everything a client can cause becomes an answer here, in the shape of the path's API; every
request is counted here once, whatever happens.

A client that leaves (P9): its connection cancels the request's task, and the `finally` blocks on the way out
drop the pod's connection, close the lease and leave the queue.
"""

import asyncio
import logging
import random
import time

from leadline.gateway.admission.admission import Admission
from leadline.gateway.errors import shutting_down
from leadline.gateway.metrics import GatewayMetrics
from leadline.gateway.principal import Principal
from leadline.gateway.proxy.access_log import AccessLog
from leadline.gateway.proxy.attempts import Dispatcher
from leadline.gateway.proxy.body import amended
from leadline.gateway.proxy.call import Call
from leadline.gateway.proxy.dialects import DIALECTS
from leadline.gateway.proxy.gate import KeyGate
from leadline.gateway.proxy.headers import header
from leadline.gateway.proxy.relay import relay
from leadline.gateway.proxy.routing import expected_tokens, known_prompt, read_prompt
from leadline.gateway.proxy.settings import ProxySettings
from leadline.gateway.proxy.tracing import Tracing
from leadline.gateway.services import ServiceTable
from leadline.gateway.stored_responses import ResponseStore
from leadline.protocol.errors import RequestError
from leadline.protocol.http.answers import InternalError, answer_to
from leadline.protocol.http.exchange import ClientGone, Exchange
from leadline.protocol.http.head import authorization_of
from leadline.protocol.http.request_id import NAME, request_id

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
        gate: KeyGate,
        responses: ResponseStore,
        access_log: AccessLog | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._table = table
        self._admission = admission
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._settings = settings
        self._gate = gate
        self._responses = responses
        self._access_log = access_log
        self._tracing = tracing
        self._rng = random.Random()
        self.in_flight = 0

    async def __call__(self, exchange: Exchange) -> None:
        books = _Books(time.monotonic(), exchange.headers)
        self.in_flight += 1
        try:
            await self._serve(exchange, books)
        except RequestError as error:
            books.status = error.status
            if not exchange.started:
                _error_answer(error, exchange, books)
        except ClientGone:
            books.status = 499
        except asyncio.CancelledError:
            delivered = books.call is not None and books.call.delivered
            books.status = 0 if delivered else 499
            if not exchange.gone:  # the server stops, and its patience has ended
                books.status = 0 if delivered else 503
                if not exchange.started:
                    _error_answer(shutting_down(), exchange, books)
                raise
        except Exception:
            logger.exception("a request failed unexpectedly")
            books.status = 500
            if not exchange.started:
                _error_answer(InternalError(), exchange, books)
        finally:
            if not exchange.finished:
                exchange.drop()
            self.in_flight -= 1
            self._close(exchange, books)

    async def _serve(self, exchange: Exchange, books: "_Books") -> None:
        gate, dialect = self._gate, DIALECTS[exchange.path]
        authorization = authorization_of(exchange.headers, self._settings.max_body_bytes)
        explain = header(exchange.headers, b"x-leadline-explain") not in (None, b"", b"0", b"false")
        if gate.checks_slowly:
            principal = await gate.authenticate_slow(authorization)
        else:
            principal = gate.authenticate(authorization)
        books.principal = principal
        body = await exchange.body(self._settings.max_body_bytes)

        began = time.monotonic()
        if dialect.stored is not None:
            most = self._settings.max_body_bytes
            body = amended(body, **await self._responses.resolve(body, principal.tenant, most))
        incoming = dialect.read(body)
        fields = incoming.fields
        service = self._table.resolve(fields.model, self._rng)
        gate.check_model(principal, fields.model, service)
        deadline = None if fields.deadline is None else books.arrived + fields.deadline
        metrics = self._metrics.service(service.name)
        prompt = known_prompt(service, incoming) or await read_prompt(service, incoming)
        asking = _Asking(principal, fields.priority_class)
        call = books.call = Call(
            path=exchange.target,
            dialect=dialect,
            headers=books.headers,
            extra_headers=books.extra_headers,
            client=exchange.client,
            incoming=incoming,
            service=service,
            metrics=metrics,
            prompt=prompt,
            arrived=books.arrived,
            explain=explain,
            deadline=deadline,
            batch=asking.priority_class == "batch" != fields.priority_class,
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
        books.estimated = estimate if dialect.local is None else 0
        if gate.limits(principal):
            limits = await gate.take(principal, books.estimated)
            books.extra_headers += [(name.lower().encode(), value.encode()) for name, value in limits.items()]
        books.taken = True
        if (
            dialect.local is not None
            and (answer := await dialect.local(service, incoming, prompt)) is not None
        ):
            call.status = 200
            exchange.answer(200, [(b"content-type", b"application/json"), *books.extra_headers], answer)
            return
        patience = fields.queue_timeout
        ticket = self._admission.enter(service, asking, deadline, estimate, patience=patience)
        if not ticket.let_in():
            await ticket.turn()
            metrics.queued.observe(ticket.waited_seconds)
            if patience is not None:
                call.patience = max(0.0, patience - ticket.waited_seconds)
        try:
            attempt = await self._dispatcher.answer(call, ticket=ticket)
            metrics.routing.observe(spent + call.picking_seconds)
            await relay(self._dispatcher, call, attempt, exchange)
        finally:
            ticket.leave()

    def _close(self, exchange: Exchange, books: "_Books") -> None:
        call = books.call
        if call is None:
            self._metrics.service("").ended(books.status)
        else:
            if books.status:
                call.status = books.status
            call.close()
            principal = books.principal
            if books.taken and principal is not None:
                self._settle(call, principal, books.estimated)
            if self._tracing is not None:
                self._tracing.end(call)
        if self._access_log is not None:
            self._access_log.write(
                exchange, books.request_id, books.arrived, books.status, call, books.principal
            )

    def _settle(self, call: Call, principal: Principal, estimated: int) -> None:
        """Put what the key was charged right. Failures cost nothing; a client that leaves has had what went
        to it, and the prompt if a pod was asked."""
        total = call.total_tokens
        if call.status == 499 and total is None:
            total = call.prompt.tokens if call.attempts else 0
        elif call.status >= 400 and call.status != 499:
            total = 0
        if total is not None:
            self._gate.settle(principal, estimated, total)


class _Books:
    """What is known of one request for the books."""

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


class _Asking:
    """A principal at the door: its key's class, unless the request asks for less."""

    __slots__ = ("priority_class", "tenant")

    def __init__(self, principal: Principal, asked: str | None) -> None:
        self.tenant = principal.tenant
        self.priority_class = "batch" if asked == "batch" else principal.priority_class


def _error_answer(error: RequestError, exchange: Exchange, books: _Books) -> None:
    """Answer with an error in the shape and the words of the path's API."""
    error = DIALECTS[exchange.path].worded(error)
    books.status, headers, body = answer_to(error, exchange.path, books.request_id)
    exchange.answer(books.status, headers + books.extra_headers, body)
