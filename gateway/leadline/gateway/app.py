"""The gateway's ASGI application: the proxy for completions, FastAPI for the rest, what lives behind both.

`Gateway` puts the parts together from a `GatewayConfig` and starts and stops what runs in the background:
discovery, the reader of Redis, the tokenizers, the reload of keys. One process, one event loop; several
gateways share nothing but Redis.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from leadline.gateway.access.keys import KeyRing
from leadline.gateway.access.limits import RateLimits
from leadline.gateway.access.principal import Principal
from leadline.gateway.admission.admission import Admission
from leadline.gateway.background import Background
from leadline.gateway.config.file import ConfigFile, ConfigWatch
from leadline.gateway.config.settings import GatewayConfig
from leadline.gateway.errors import NoPods, no_tokenizer, shutting_down, unknown_model
from leadline.gateway.metrics.metrics import GatewayMetrics
from leadline.gateway.proxy.access_log import AccessLog
from leadline.gateway.proxy.dispatcher import Dispatcher
from leadline.gateway.proxy.handler import ProxyHandler
from leadline.gateway.proxy.tracing import start_tracing
from leadline.gateway.request.dialects import DIALECTS
from leadline.gateway.services import build_table
from leadline.gateway.stored_responses import ResponseStore, listed
from leadline.gateway.tokens.service import TokenService
from leadline.gateway.upstream.settings import ProxySettings
from leadline.protocol.errors import RequestError
from leadline.protocol.http.answers import answer_to, error_body
from leadline.protocol.http.asgi import EXCHANGE, Receive, Scope, Send, serve_asgi
from leadline.protocol.http.deadlines import Deadlines
from leadline.protocol.http.exchange import Exchange
from leadline.protocol.http.headers import NAME, authorization_of
from leadline.protocol.openai.body import encode_body
from leadline.protocol.openai.paths import no_such_path
from leadline.protocol.openai.service import ModelCard, ModelList, VersionResponse

__all__ = ["Gateway", "proxy_settings"]

Handler = Callable[..., Awaitable[Response]]

logger = logging.getLogger("leadline.gateway")


def proxy_settings(config: GatewayConfig, **changes: Any) -> ProxySettings:
    """The proxy's part of the configuration."""
    upstream, server = config.upstream, config.server
    values: dict[str, Any] = {
        "max_body_bytes": server.max_body_bytes,
        "request_timeout": server.request_timeout_seconds,
        "write_timeout": server.write_timeout_seconds,
        "keep_alive": server.keep_alive_seconds,
        "cors_origins": tuple(server.cors_origins),
        "connect_timeout": upstream.connect_timeout_seconds,
        "first_byte_timeout": upstream.first_byte_timeout_seconds,
        "answer_timeout": upstream.answer_timeout_seconds,
        "idle_timeout": upstream.idle_timeout_seconds,
        "max_attempts": 1 + upstream.retries,
        "migration": "auto" if upstream.migrations else "off",
        "max_migrations": upstream.migrations,
        "breaker_failures": upstream.breaker_failures,
        "breaker_seconds": upstream.breaker_seconds,
        "breaker_max_seconds": max(30.0, upstream.breaker_seconds),
        "access_log": server.access_log,
        "drain_timeout": server.shutdown_seconds,
    }
    return ProxySettings(**(values | changes))


class WrongServer(RequestError):
    """The application runs under a server that is not ours."""

    status = 501
    type = "server_error"

    def __init__(self) -> None:
        super().__init__(
            "this gateway runs as a plain ASGI application, which serves /health, /ready, /metrics and "
            "/v1/models only; start it with `leadline gateway`, or give uvicorn the class "
            "leadline.protocol.http.server_protocol.ServerProtocol as its `http`",
            code="wrong_server",
        )


async def _not_started(scope: Scope, receive: Receive, send: Send) -> None:
    error = NoPods("the gateway is starting", code="starting", retry_after=1)
    await _error(error, scope)(scope, receive, send)


class Gateway:
    """Serve it with uvicorn and `ServerProtocol`. `__call__` is the ASGI application of everything but the
    hot path; its lifespan events start and stop all of it."""

    def __init__(
        self, config: GatewayConfig, settings: ProxySettings | None = None, *, file: ConfigFile | None = None
    ) -> None:
        """`file`: the settings' source, to be watched. Raises ConfigError; connects to nothing yet."""
        self.config = config
        self.settings = settings or proxy_settings(config)
        self.table = build_table(config)
        self.admission = Admission(config.admission)
        self.metrics = GatewayMetrics()
        self.config_watch = ConfigWatch(file, self.metrics.settings_file) if file is not None else None
        self.keys = KeyRing(config.keys_file or None)
        self.responses = ResponseStore(config.redis_url, config.responses)
        self.background = Background(
            config, self.table, self.admission, self.metrics, refresh=self.refresh_metrics
        )
        self.draining = False
        self.limits: RateLimits | None = None
        self.access_log: AccessLog | None = None
        """Both while it runs."""
        self._rest = _rest_of_the_api(self)
        self._proxy: ProxyHandler | None = None
        self.deadlines = Deadlines()
        """Of clients' connections, for ServerProtocol."""

    def respond(self, exchange: Exchange) -> Coroutine[Any, Any, None]:
        """What answers a request that came by ServerProtocol."""
        if exchange.method == b"POST" and exchange.path in DIALECTS:
            if self._proxy is not None:
                return self._proxy(exchange)
            return serve_asgi(_not_started, exchange, self.settings.max_body_bytes)
        return serve_asgi(self._rest, exchange, self.settings.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in DIALECTS and scope["method"] == "POST":
            await _error(WrongServer(), scope)(scope, receive, send)
        else:
            await self._rest(scope, receive, send)

    def client_stalled(self) -> None:
        """A client was cut off because it did not read its answer."""
        self.metrics.stalled_clients.inc()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Everything that serving takes, for as long as the context is open."""
        tracing = start_tracing(self.config.server.otlp_endpoint)
        dispatcher = Dispatcher(self.settings, self.admission)
        access_log = self.access_log = AccessLog() if self.settings.access_log else None
        watches: list[Callable[[], Coroutine[Any, Any, None]]] = [self.keys.watch]
        if self.config_watch is not None:
            watches.append(self.config_watch.watch)
        limits = self.limits = await self.background.start(dispatcher, watches)
        self._proxy = ProxyHandler(
            table=self.table,
            admission=self.admission,
            dispatcher=dispatcher,
            metrics=self.metrics,
            settings=self.settings,
            keys=self.keys,
            limits=limits,
            responses=self.responses,
            access_log=access_log,
            tracing=tracing,
        )
        try:
            yield
        finally:
            self.draining = True
            await self.background.stop()
            dispatcher.close()
            await self.responses.close()
            if access_log is not None:
                access_log.flush()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    @property
    def in_flight(self) -> int:
        return self._proxy.in_flight if self._proxy is not None else 0

    async def scrape(self) -> bytes:
        """Return the metrics of this gateway, those of all its workers included."""
        self.refresh_metrics()
        return await asyncio.to_thread(self.metrics.render)

    def refresh_metrics(self) -> None:
        waiting = {service.name: self.admission.waiting(service) for service in self.table}
        self.metrics.refresh(self.table, time.monotonic(), waiting)


def _rest_of_the_api(gateway: Gateway) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with gateway.running():
            yield

    app = FastAPI(
        title="Leadline gateway",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,  # a Location made of the client's Host header would lead anywhere
    )

    def get(path: str) -> Callable[[Handler], Handler]:
        return app.api_route(path, methods=["GET", "HEAD"])

    @get("/health")
    async def health() -> Response:
        """200 as long as the process is of use."""
        return _json(b'{"status":"ok"}')

    @get("/ready")
    async def ready() -> Response:
        """200 when some service has a pod that takes requests, or gets one when a request waits, and this
        gateway does not leave."""
        if gateway.draining:
            return _error(shutting_down())
        if not any(service.can_serve() or service.can_wake() for service in gateway.table):
            return _error(NoPods("no service has a pod that takes requests", code="no_pods", retry_after=1))
        return _json(b'{"status":"ready"}')

    if gateway.config.server.metrics_port is None:

        @get("/metrics")
        async def metrics() -> Response:
            return Response(await gateway.scrape(), media_type=CONTENT_TYPE_LATEST)

    @get("/version")
    async def version() -> Response:
        return _json(encode_body(VersionResponse(version=_version())))

    def cards(request: Request) -> list[ModelCard]:
        """Of the models that the key may use. Raises InvalidKey."""
        principal = _principal_of(request, gateway)
        return [card for card in gateway.table.model_cards() if principal.allows(card.id)]

    @get("/v1/models")
    async def models(request: Request) -> Response:
        try:
            return _json(encode_body(ModelList(data=cards(request))))
        except RequestError as error:
            return _error(error)

    @get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        """One of them; names may hold slashes."""
        try:
            for card in cards(request):
                if card.id == name:
                    return _json(encode_body(card))
            raise unknown_model(name)
        except RequestError as error:
            return _error(error)

    if gateway.config.server.tokenizer_info:

        @get("/tokenizer_info")
        async def tokenizer_info(request: Request) -> Response:
            """Of the model in the query, which may be missing where there is one service."""
            try:
                principal = _principal_of(request, gateway)
                model = request.query_params.get("model")
                service = gateway.table.resolve(model)
                principal.require_service(model, service)
                if not isinstance(service.tokens, TokenService):
                    raise no_tokenizer(service.name)
                return _json(encode_body(service.tokens.tokenizer.info()))
            except RequestError as error:
                return _error(error)

    if gateway.responses.enabled:
        _add_stored_responses(app, gateway)

    @app.exception_handler(HTTPException)
    async def router_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404 and request.url.path in DIALECTS:
            error = HTTPException(405, headers={"Allow": "POST"})  # whose POST never comes here
        path = request.url.path
        if error.status_code == 404:
            kind, message = "not_found_error", no_such_path(path, _SERVED)
        else:
            what = {405: f"{request.method} is not a method of this path"}
            kind, message = "invalid_request_error", f"{what.get(error.status_code, error.detail)}: {path}"
        name = request.headers.get("x-request-id")
        status, body = error_body(path, error.status_code, message, type=kind, request_id=name)
        return Response(body, status, dict(error.headers or {}), "application/json")

    return app


def _principal_of(request: Request, gateway: Gateway) -> Principal:
    """Return the caller. Raises InvalidKey."""
    authorization = authorization_of(request.scope["headers"], gateway.settings.max_body_bytes)
    return gateway.keys.authenticate(authorization)


def _add_stored_responses(app: FastAPI, gateway: Gateway) -> None:
    """Routes of responses that are stored."""
    store = gateway.responses

    async def shown(tenant: str, name: str) -> bytes:
        return _json_of((await store.get(tenant, name)).response)

    async def deleted(tenant: str, name: str) -> bytes:
        await store.delete(tenant, name)
        return _json_of({"id": name, "object": "response.deleted", "deleted": True})

    async def items(tenant: str, name: str) -> bytes:
        return _json_of(listed(name, (await store.get(tenant, name)).input))

    @app.get("/v1/responses/{name}")
    async def response(request: Request, name: str) -> Response:
        return await _recorded(request, gateway, partial(shown, name=name))

    @app.delete("/v1/responses/{name}")
    async def delete(request: Request, name: str) -> Response:
        return await _recorded(request, gateway, partial(deleted, name=name))

    @app.get("/v1/responses/{name}/input_items")
    async def input_items(request: Request, name: str) -> Response:
        return await _recorded(request, gateway, partial(items, name=name))


async def _recorded(
    request: Request, gateway: Gateway, answer: Callable[[str], Awaitable[bytes]]
) -> Response:
    """Answer a request of a tenant as the proxy does others: as one of its key's limit, with a line in the
    access log, and counted."""
    arrived, principal, status = time.monotonic(), None, 500
    limits = gateway.limits
    try:
        principal = _principal_of(request, gateway)
        left: dict[str, str] = {}
        if limits is not None and limits.apply_to(principal):
            left = await limits.take(principal, 0)
        made = _json(await answer(principal.tenant))
        made.headers.update(left)
        status = made.status_code
        return made
    except RequestError as error:
        status = error.status
        return _error(error)
    finally:
        gateway.metrics.service("").ended(status)
        if gateway.access_log is not None and (exchange := request.scope.get(EXCHANGE)) is not None:
            name = dict(exchange.headers)[NAME]
            gateway.access_log.write(exchange, name, arrived, status, None, principal)


_json_of = msgspec.json.Encoder().encode
_SERVED = [*DIALECTS, "/v1/models", "/health", "/ready", "/metrics", "/version"]


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _error(error: RequestError, scope: Scope | None = None) -> Response:
    """`scope`: of a request for a path with errors of its own shape."""
    path, name = "", None
    if scope is not None:
        path, name = scope["path"], dict(scope["headers"]).get(NAME)
    status, headers, body = answer_to(error, path, name)
    return Response(body, status, {name.decode(): value.decode() for name, value in headers})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("leadline")
    except PackageNotFoundError:
        return "unknown"
