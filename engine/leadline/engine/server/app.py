"""The FastAPI application: which path leads to which handler, and what every answer has in common.

Every error a client sees has the shape of its path's API, also those of the router (404, 405). A handler
takes (request, state) and returns a response or raises; `_endpoint` is the one place where exceptions become
answers.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from leadline.engine.client.async_engine import AsyncEngine
from leadline.engine.server.api import chat, completions, messages, pooling, responses
from leadline.engine.server.api.generation import log_failure
from leadline.engine.server.http.responses import ApiError, ClientGone, api_error, error_response
from leadline.engine.server.metrics.metrics import Metrics
from leadline.engine.server.routes import service
from leadline.engine.server.routes.openapi import document
from leadline.engine.server.settings import ServerSettings
from leadline.engine.server.state import Phase, ServerState
from leadline.protocol.http.headers import authorization_of
from leadline.protocol.openai.paths import no_such_path

__all__ = ["create_app"]

logger = logging.getLogger("leadline.engine.server")

Handler = Callable[[Request, ServerState], Awaitable[Response]]

_OPEN_ROUTES: list[tuple[str, str, Handler]] = [
    ("GET", "/health", service.health),
    ("GET", "/ready", service.ready),
    ("GET", "/metrics", service.metrics),
    ("GET", "/version", service.version),
]
_KEYED_ROUTES: list[tuple[str, str, Handler]] = [
    ("POST", "/v1/chat/completions", chat.create),
    ("POST", "/v1/completions", completions.create),
    ("POST", "/v1/messages", messages.create),
    ("POST", "/v1/messages/count_tokens", messages.count_tokens),
    ("POST", "/v1/responses", responses.create),
    ("POST", "/v1/embeddings", pooling.embeddings),
    ("POST", "/v1/rerank", pooling.rerank),
    ("POST", "/v2/rerank", pooling.rerank),
    ("POST", "/v1/score", pooling.score),
    ("GET", "/v1/models", service.models),
    ("GET", "/v1/models/{name:path}", service.model),
    ("POST", "/tokenize", service.tokenize),
    ("POST", "/detokenize", service.detokenize),
    ("GET", "/admin/tokenizer", service.tokenizer),
    ("POST", "/admin/reset_prefix_cache", service.reset_prefix_cache),
    ("POST", "/admin/warmup", service.warmup),
    ("POST", "/admin/profile", service.profile),
]

_TOKENIZER_INFO: tuple[str, str, Handler] = ("GET", "/tokenizer_info", service.tokenizer_info)

_PATHS = [path for _, path, _ in (*_KEYED_ROUTES, *_OPEN_ROUTES) if "{" not in path]


def create_app(engine: AsyncEngine | None, settings: ServerSettings) -> FastAPI:
    """The application over `engine`; with None it answers 503 until `app.state.server` is given one."""
    app = FastAPI(title="Leadline engine", docs_url="/docs", redoc_url=None, redirect_slashes=False)
    state = ServerState(settings, Metrics(lambda: state.core_state()), engine)
    if engine is not None:
        state.phase, state.detail = Phase.SERVING, "ready"
    app.state.server = state
    app.openapi = document  # type: ignore[method-assign]
    keyed_routes = [*_KEYED_ROUTES, _TOKENIZER_INFO] if settings.tokenizer_info else _KEYED_ROUTES
    for routes, keyed in ((_OPEN_ROUTES, False), (keyed_routes, bool(settings.api_keys))):
        for method, path, handler in routes:
            app.add_api_route(
                path,
                _endpoint(handler, state, keyed),
                methods=["GET", "HEAD"] if method == "GET" else [method],
                response_model=None,
                include_in_schema=False,
            )

    @app.exception_handler(HTTPException)
    async def router_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        if error.status_code == 404:
            message = no_such_path(path, _PATHS)
        else:
            what = {405: f"{request.method} is not a method of this path"}
            message = f"{what.get(error.status_code, error.detail)}: {path}"
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        failure = ApiError(error.status_code, message, type=kind, headers=dict(error.headers or {}))
        return error_response(failure, request)

    return app


def _endpoint(handler: Handler, state: ServerState, keyed: bool) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            if keyed:
                _check_key(request, state.settings)
            return await handler(request, state)
        except ClientGone:
            return Response(status_code=499)  # goes nowhere
        except Exception as error:
            answer = api_error(error)
            if answer.code == "internal_error":
                log_failure(request, error, answer)
            return error_response(answer, request)

    return endpoint


def _check_key(request: Request, settings: ServerSettings) -> None:
    authorization = authorization_of(request.scope["headers"], settings.max_body_bytes)
    scheme, _, given = (authorization or "").partition(" ")
    # Every key is compared, in constant time each, so that timing tells nothing.
    matches = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in settings.api_keys]
    if scheme.lower() != "bearer" or not any(matches):
        raise ApiError(
            401,
            "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
            type="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
