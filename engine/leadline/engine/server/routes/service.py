"""Everything beside generation: models, tokenization, probes, metrics, administration."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from typing import Any, TypeVar

from fastapi import Request
from msgspec import UNSET
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from leadline.engine.client.async_engine import AsyncEngine
from leadline.engine.server.api.params import encode, prompts_of
from leadline.engine.server.http.responses import ApiError, JSONBytes, read_body
from leadline.engine.server.state import Phase, ServerState
from leadline.protocol.errors import ErrorObject
from leadline.protocol.openai.profile import ProfileRequest, ProfileResponse
from leadline.protocol.openai.service import (
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    NotReadyResponse,
    ResetPrefixCacheResponse,
    StatusResponse,
    TokenizeRequest,
    TokenizeResponse,
    VersionResponse,
    WarmupRequest,
    WarmupResponse,
)
from leadline.protocol.text.prompts import check_token_ids, token_strs

__all__ = [
    "detokenize",
    "health",
    "leadline_version",
    "metrics",
    "model",
    "models",
    "profile",
    "ready",
    "reset_prefix_cache",
    "tokenize",
    "tokenizer",
    "tokenizer_info",
    "version",
    "warmup",
]


async def profile(request: Request, state: ServerState) -> Response:
    """`POST /admin/profile`: record a torch profiler trace of the engine core in the configured directory.

        {"steps": 50}  or  {"seconds": 2.5}   →   200 {"path": ..., "steps": 50, "seconds": 1.9}

    Off unless the engine was started with a `profile_dir`. One at a time: 409 for others, even if the client
    that began it has left.
    """
    body = await read_body(request, ProfileRequest, state.settings.max_body_bytes)
    engine = state.admit()
    if engine.profile_dir is None:
        raise ApiError(
            403,
            "profiling is off: start the engine with --profile-dir DIRECTORY, which is where traces go",
            type="permission_error",
            code="profiling_off",
        )
    answer = await engine.profile(steps=body.steps, seconds=body.seconds)
    if answer.code is not None:
        status = 409 if answer.code == "profile_running" else 500
        kind = "invalid_request_error" if status == 409 else "server_error"
        raise ApiError(status, answer.error, type=kind, code=answer.code)
    return JSONBytes(ProfileResponse(path=answer.path, steps=answer.steps, seconds=answer.seconds))


_STARTED = int(time.time())
_INLINE_IDS = 4096
T = TypeVar("T")


def leadline_version() -> str:
    try:
        return package_version("leadline")
    except PackageNotFoundError:
        return "unknown"


async def health(_: Request, state: ServerState) -> Response:
    """200 while the process is of use, loading and draining included: a liveness probe must not kill
    those. Nor must it kill a core in a long step, but one that is frozen."""
    if state.phase is Phase.FAILED:
        raise ApiError(503, state.detail, type="server_error", code="engine_dead")
    state.check_frozen()
    return JSONBytes(StatusResponse(status=state.phase.value, progress=state.progress))


async def ready(_: Request, state: ServerState) -> Response:
    is_ready, why = state.ready()
    if not is_ready:
        error = ErrorObject(message=why, type="server_error", code="not_ready")
        body = NotReadyResponse(error=error, progress=state.progress)
        return JSONBytes(body, 503, {"Retry-After": "1"})
    return JSONBytes(StatusResponse(status="ready"))


async def metrics(_: Request, state: ServerState) -> Response:
    body = state.metrics.render() if state.page is None else await state.page()
    return Response(body, media_type=CONTENT_TYPE_LATEST)


async def version(_: Request, state: ServerState) -> Response:
    return JSONBytes(VersionResponse(version=leadline_version(), resumes_streams=True))


async def models(_: Request, state: ServerState) -> Response:
    engine = state.admit()
    return JSONBytes(ModelList(data=[_card(name, engine) for name in state.names]))


async def model(request: Request, state: ServerState) -> Response:
    engine = state.admit()
    name = request.path_params["name"]
    state.check_model(name)
    return JSONBytes(_card(name, engine))


def _card(name: str, engine: AsyncEngine) -> ModelCard:
    return ModelCard(
        id=name,
        created=_STARTED,
        root=engine.served_name,
        max_model_len=engine.max_model_len,
        task=UNSET if engine.task == "generate" else engine.task,
        prefix_chain=UNSET if engine.prefix_chain is None else engine.prefix_chain,
    )


async def tokenize(request: Request, state: ServerState) -> Response:
    body = await read_body(request, TokenizeRequest, state.settings.max_body_bytes)
    engine = state.admit()
    state.check_model(body.model)
    (prompt,) = await prompts_of(body, engine)
    tokens = await encode(prompt, engine)
    answer = TokenizeResponse(tokens=tokens, count=len(tokens), max_model_len=engine.max_model_len)
    if body.return_token_strs:
        answer.token_strs = await _worked_out(tokens, token_strs, tokens, engine.tokenizer)
    return JSONBytes(answer, headers=body.skipped_header)


async def detokenize(request: Request, state: ServerState) -> Response:
    body = await read_body(request, DetokenizeRequest, state.settings.max_body_bytes)
    engine = state.admit()
    state.check_model(body.model)
    check_token_ids(body.tokens, engine.tokenizer.vocab_size, "tokens")
    text = await _worked_out(body.tokens, engine.tokenizer.decode, body.tokens)
    return JSONBytes(DetokenizeResponse(prompt=text))


async def _worked_out(ids: Sequence[int], function: Callable[..., T], *args: Any) -> T:
    """Return what the function makes of token ids; in a thread where they are many, as streams wait."""
    return function(*args) if len(ids) <= _INLINE_IDS else await asyncio.to_thread(function, *args)


async def tokenizer(request: Request, state: ServerState) -> Response:
    """The tokenizer bundle, for gateways. Its entity tag is its digest, so asking again costs nothing."""
    engine = state.admit()
    if not engine.tokenizer_bundle:
        raise ApiError(
            404, "this tokenizer cannot be passed on", type="not_found_error", code="no_tokenizer_bundle"
        )
    headers = {"ETag": f'"{engine.tokenizer_digest}"', "Cache-Control": "no-cache"}
    asked = {tag.strip() for tag in request.headers.get("if-none-match", "").split(",")}
    if asked & {headers["ETag"], "*"}:
        return Response(status_code=304, headers=headers)
    return Response(engine.tokenizer_bundle, headers=headers, media_type="application/msgpack")


async def tokenizer_info(_: Request, state: ServerState) -> Response:
    return JSONBytes(state.admit().tokenizer.info())


async def reset_prefix_cache(_: Request, state: ServerState) -> Response:
    engine = state.admit()
    blocks = await engine.reset_prefix_cache()
    return JSONBytes(ResetPrefixCacheResponse(blocks=blocks))


async def warmup(request: Request, state: ServerState) -> Response:
    body = await read_body(request, WarmupRequest, state.settings.max_body_bytes)
    engine = state.admit_for("generate")
    report = await engine.warmup(body.prompts, cache_salt=body.cache_salt or "")
    return JSONBytes(
        WarmupResponse(
            prompts=report.prompts,
            prompt_tokens=report.prompt_tokens,
            cached_tokens=report.cached_tokens,
            seconds=report.seconds,
        )
    )
