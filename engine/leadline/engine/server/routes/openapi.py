"""The OpenAPI document, made from the same msgspec types that decode the requests."""

from __future__ import annotations

import functools
import re
from typing import Any

import msgspec

from leadline.engine.server.routes.service import leadline_version
from leadline.protocol.anthropic.answers import (
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    MessageAnswer,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageTokensCount,
    Ping,
)
from leadline.protocol.anthropic.errors import ErrorAnswer, ErrorEvent
from leadline.protocol.anthropic.request import CountTokensRequest, MessagesRequest
from leadline.protocol.errors import ErrorResponse
from leadline.protocol.openai.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
)
from leadline.protocol.openai.chat import ChatCompletionRequest
from leadline.protocol.openai.completion import CompletionRequest
from leadline.protocol.openai.pooling import (
    EmbeddingList,
    EmbeddingRequest,
    RerankAnswer,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
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
    TokenizerInfoResponse,
    VersionResponse,
    WarmupRequest,
    WarmupResponse,
)
from leadline.protocol.responses import ResponsesRequest
from leadline.protocol.responses.objects import ResponseObject, StreamEvent

__all__ = ["document"]

_ERRORS = {
    400: "The request cannot be served as it stands; the message says what to change.",
    401: "No valid API key.",
    403: "Switched off by the server's configuration.",
    404: "No model of that name, or one that is served for another task.",
    413: "The body is too long.",
    429: "The queue is full; Retry-After says when to come back.",
    500: "The engine failed.",
    503: "Loading, shutting down, or queued for too long; Retry-After says when to come back.",
    504: "The request's own deadline passed.",
    529: "The queue is full, or the server is loading or shutting down; Retry-After says when to come back.",
}
_OTHER_SHAPES: dict[tuple[str, int], Any] = {("/ready", 503): NotReadyResponse}
_GENERATE = (400, 401, 404, 413, 429, 500, 503, 504)
_ERROR_OF = {"/v1/messages": ErrorAnswer, "/v1/messages/count_tokens": ErrorAnswer}
"""Paths whose errors have a shape of their own."""
_MESSAGE_EVENT = (
    MessageStart
    | Ping
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | ErrorEvent
)
"""Their names are those of their types."""
_TEXT = (400, 401, 404, 413, 500, 503)

# path, method, summary, request type, answer type, chunk type of a stream, statuses of errors
_OPERATIONS: list[tuple[str, str, str, Any, Any, Any, tuple[int, ...]]] = [
    (
        "/v1/chat/completions",
        "post",
        "Answer a conversation",
        ChatCompletionRequest,
        ChatCompletion,
        ChatCompletionChunk,
        _GENERATE,
    ),
    ("/v1/completions", "post", "Continue a text", CompletionRequest, Completion, Completion, _GENERATE),
    (
        "/v1/messages",
        "post",
        "Answer a conversation, in Anthropic's form",
        MessagesRequest,
        MessageAnswer,
        _MESSAGE_EVENT,
        (400, 401, 404, 413, 500, 504, 529),
    ),
    (
        "/v1/messages/count_tokens",
        "post",
        "Count the tokens of a conversation",
        CountTokensRequest,
        MessageTokensCount,
        None,
        (400, 401, 404, 413, 500, 529),
    ),
    (
        "/v1/responses",
        "post",
        "Answer a conversation, in the form of the Responses API",
        ResponsesRequest,
        ResponseObject,
        StreamEvent,
        _GENERATE,
    ),
    ("/v1/embeddings", "post", "Texts to vectors", EmbeddingRequest, EmbeddingList, None, _GENERATE),
    ("/v1/rerank", "post", "Documents by relevance", RerankRequest, RerankAnswer, None, _GENERATE),
    (
        "/v2/rerank",
        "post",
        "Documents by relevance, for Cohere's clients",
        RerankRequest,
        RerankAnswer,
        None,
        _GENERATE,
    ),
    ("/v1/score", "post", "A score for each pair of texts", ScoreRequest, ScoreList, None, _GENERATE),
    ("/v1/models", "get", "The model served", None, ModelList, None, (401, 500, 503)),
    ("/v1/models/{name}", "get", "A name of the model", None, ModelCard, None, (401, 404, 500, 503)),
    ("/tokenize", "post", "Text to token ids", TokenizeRequest, TokenizeResponse, None, _TEXT),
    ("/detokenize", "post", "Token ids to text", DetokenizeRequest, DetokenizeResponse, None, _TEXT),
    (
        "/tokenizer_info",
        "get",
        "Special tokens and chat template, with --tokenizer-info",
        None,
        TokenizerInfoResponse,
        None,
        (401, 404, 500, 503),
    ),
    ("/health", "get", "The process is up", None, StatusResponse, None, (503,)),
    ("/ready", "get", "The model is loaded and the loop moves", None, StatusResponse, None, (503,)),
    ("/version", "get", "Version of Leadline", None, VersionResponse, None, ()),
    (
        "/admin/reset_prefix_cache",
        "post",
        "Forget all cached prefixes",
        None,
        ResetPrefixCacheResponse,
        None,
        (401, 409, 500, 503),
    ),
    ("/admin/warmup", "post", "Fill the prefix cache", WarmupRequest, WarmupResponse, None, _GENERATE),
    (
        "/admin/profile",
        "post",
        "Record a trace of the engine core",
        ProfileRequest,
        ProfileResponse,
        None,
        (400, 401, 403, 409, 413, 500, 503),
    ),
]


def _named_event(event: dict[str, Any]) -> dict[str, Any]:
    """One server-sent event that has a name."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": event}
    properties = {"event": {"type": "string"}, "data": data}
    return {"type": "object", "required": ["event", "data"], "properties": properties}


def _event(chunk: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    """One server-sent event: before OpenAPI 3.2, by convention, `schema` of a stream describes each."""
    json_text = {"type": "string", "contentMediaType": "application/json"}
    data = [json_text | {"contentSchema": {"anyOf": [chunk, error]}}, {"const": "[DONE]"}]
    return {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": data}}}


def _refusal(status: int, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": _ERRORS.get(status, "Refused in the current state."),
        "content": {"application/json": {"schema": schema}},
    }


@functools.cache
def document() -> dict[str, Any]:
    types: list[Any] = [ErrorResponse, *_OTHER_SHAPES.values(), *set(_ERROR_OF.values())]
    for _, _, _, request, answer, chunk, _ in _OPERATIONS:
        types += [kind for kind in (request, answer, chunk) if kind is not None and kind not in types]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for path, method, summary, request, answer, chunk, errors in _OPERATIONS:
        content = {"application/json": {"schema": schema_of[answer]}}
        error_kind = _ERROR_OF.get(path, ErrorResponse)
        if chunk in (_MESSAGE_EVENT, StreamEvent):
            content["text/event-stream"] = {"schema": _named_event(schema_of[chunk])}
        elif chunk is not None:
            content["text/event-stream"] = {"schema": _event(schema_of[chunk], schema_of[ErrorResponse])}
        responses: dict[str, Any] = {"200": {"description": "OK", "content": content}}
        for status in errors:
            shape = _OTHER_SHAPES.get((path, status), error_kind)
            responses[str(status)] = _refusal(status, schema_of[shape])
        operation: dict[str, Any] = {
            "summary": summary,
            "operationId": re.sub(r"\W+", "_", path.strip("/{}")),
            "responses": responses,
        }
        if path.endswith("{name}"):
            name = {
                "name": "name",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "minLength": 1},
            }
            operation["parameters"] = [name]
        if request is not None:
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": schema_of[request]}},
            }
        paths[path] = {method: operation}
    refusals = {str(status): _refusal(status, schema_of[ErrorResponse]) for status in (401, 404, 500, 503)}
    bundle = {"application/msgpack": {"schema": {"type": "string", "format": "binary"}}}
    paths["/admin/tokenizer"] = {
        "get": {
            "summary": "The tokenizer, for gateways (leadline.protocol.text.bundle)",
            "operationId": "admin_tokenizer",
            "responses": {
                "200": {"description": "OK; the entity tag is the digest", "content": bundle},
                "304": {"description": "If-None-Match names it"},
                **refusals,
            },
        }
    }
    paths["/metrics"] = {
        "get": {
            "summary": "Prometheus metrics",
            "operationId": "metrics",
            "responses": {
                "200": {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}
            },
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Leadline engine", "version": leadline_version()},
        "paths": paths,
        "components": {"schemas": components},
    }
