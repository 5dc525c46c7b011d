"""`POST /v1/embeddings`, `/v1/rerank` and `/v1/score`: one request to the core, one answer.

Texts are tokenized in a thread where they are long. A vector is written as OpenAI does: as numbers, or as
the base64 of its float32 values. A large answer is made in parts, so that it does not hold up others.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from array import array
from collections.abc import Awaitable, Callable

import msgspec
from fastapi import Request
from starlette.responses import Response

from leadline.engine.client.async_engine import AsyncEngine
from leadline.engine.messages import PoolingRequest
from leadline.engine.pooling.builder import PoolingBuilder
from leadline.engine.pooling.spec import Task
from leadline.engine.server.api.generation import created_now, new_id
from leadline.engine.server.http.responses import JSONBytes, read_body
from leadline.engine.server.metrics.metrics import RequestTimer
from leadline.engine.server.state import ServerState, check_task
from leadline.protocol.openai.pooling import (
    Document,
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    PoolingFields,
    PoolingUsage,
    RankedDocument,
    RerankAnswer,
    RerankRequest,
    Score,
    ScoreList,
    ScoreRequest,
)

__all__ = ["embeddings", "rerank", "score"]

_INLINE_CHARACTERS = 16_384
"""Shorter texts tokenize in about a millisecond, less than the hop to a thread is worth."""
_VALUES_A_PART = 65_536
"""Of vectors that are written as numbers without a pause: about 10 ms of work."""
_encode = msgspec.json.Encoder().encode

_Build = Callable[[PoolingBuilder, float], PoolingRequest]
_Write = Callable[[AsyncEngine, PoolingRequest, "array[float]"], Awaitable[Response]]


async def embeddings(request: Request, state: ServerState) -> Response:
    body = await read_body(request, EmbeddingRequest, state.settings.max_body_bytes)
    size = sum(len(one) for one in body.inputs())

    def build(builder: PoolingBuilder, arrival: float) -> PoolingRequest:
        return builder.embeddings(body, arrival)

    async def write(engine: AsyncEngine, sent: PoolingRequest, values: array[float]) -> Response:
        vectors = await _vectors(values, len(sent.inputs), as_base64=body.encoding_format == "base64")
        head = _encode(EmbeddingList(data=[], model=engine.served_name, usage=_usage(sent)))
        return Response(head.replace(b"[]", b"[" + vectors + b"]", 1), media_type="application/json")

    return await _answered(state, body, ("embed", "embeddings"), size, build, write)


async def rerank(request: Request, state: ServerState) -> Response:
    body = await read_body(request, RerankRequest, state.settings.max_body_bytes)
    texts, shown = body.texts(), body.return_documents
    if shown is None:
        shown = not request.url.path.startswith("/v2/")

    async def write(engine: AsyncEngine, sent: PoolingRequest, values: array[float]) -> Response:
        order = sorted(range(len(texts)), key=lambda index: -values[index])[: body.top_n]
        results = [RankedDocument(index=index, relevance_score=values[index]) for index in order]
        if shown:
            for one in results:
                one.document = Document(text=texts[one.index])
        return JSONBytes(
            RerankAnswer(id=new_id("rerank-"), model=engine.served_name, results=results, usage=_usage(sent))
        )

    return await _scored(state, body, "rerank", [(body.query, text) for text in texts], write)


async def score(request: Request, state: ServerState) -> Response:
    body = await read_body(request, ScoreRequest, state.settings.max_body_bytes)

    async def write(engine: AsyncEngine, sent: PoolingRequest, values: array[float]) -> Response:
        return JSONBytes(
            ScoreList(
                id=new_id("score-"),
                created=created_now(),
                model=engine.served_name,
                data=[Score(index=index, score=value) for index, value in enumerate(values)],
                usage=_usage(sent),
            )
        )

    return await _scored(state, body, "score", body.pairs(), write)


async def _scored(
    state: ServerState,
    body: RerankRequest | ScoreRequest,
    endpoint: str,
    pairs: list[tuple[str, str]],
    write: _Write,
) -> Response:
    def build(builder: PoolingBuilder, arrival: float) -> PoolingRequest:
        return builder.pairs(body, pairs, arrival)

    size = sum(len(one) + len(other) for one, other in pairs)
    return await _answered(state, body, ("rerank", endpoint), size, build, write)


async def _answered(
    state: ServerState,
    body: PoolingFields,
    what: tuple[Task, str],
    size: int,
    build: _Build,
    write: _Write,
) -> Response:
    """The answer of one of these endpoints. `what`: the task that a model must be served for, and the
    endpoint's label in the metrics; `size`: characters and token ids of the request."""
    engine = state.admit()
    task, endpoint = what
    with RequestTimer(state.metrics, endpoint) as timer:
        state.check_model(body.model)
        check_task(engine, task)
        assert engine.pooling is not None
        arrival = time.monotonic()
        if size > _INLINE_CHARACTERS:
            sent = await asyncio.to_thread(build, engine.pooling, arrival)
        else:
            sent = build(engine.pooling, arrival)
        output = await engine.pool(sent)
        values = array("f")
        values.frombytes(output.pooled)
        timer.pooled(sum(map(len, sent.inputs)), output.queue_seconds)
        return await write(engine, sent, values)


async def _vectors(values: array[float], count: int, *, as_base64: bool) -> bytes:
    """The list of vectors as JSON, without its brackets."""
    size = len(values) // count
    parts = []
    for index in range(count):
        row = values[index * size : (index + 1) * size]
        if as_base64:
            if sys.byteorder == "big":
                row.byteswap()
            vector: list[float] | str = base64.b64encode(row.tobytes()).decode()
        else:
            vector = row.tolist()
        parts.append(_encode(Embedding(index=index, embedding=vector)))
        if index % max(1, _VALUES_A_PART // size) == 0:
            await asyncio.sleep(0)
    return b",".join(parts)


def _usage(sent: PoolingRequest) -> PoolingUsage:
    tokens = sum(map(len, sent.inputs))
    return PoolingUsage(prompt_tokens=tokens, total_tokens=tokens)
