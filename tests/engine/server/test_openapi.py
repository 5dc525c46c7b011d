"""Random requests made by schemathesis from the OpenAPI document: no crash, and every answer is one that the
document promises."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from live_server import LiveServer
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from leadline.engine.server.routes.openapi import document

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
TIME_LIMITS = {
    503: ("queue_timeout", "queue_timeout"),
    504: ("deadline", "deadline_exceeded"),
    529: ("queue_timeout", "overloaded_error"),
}
"""Status → the field of the request that causes it, and the code or type of the error."""
OPERATIONS = {
    operation.label: operation
    for operation in (
        result.ok() for result in schemathesis.openapi.from_dict(document()).get_all_operations()
    )
}


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("label", OPERATIONS)
def test_every_answer_is_one_the_document_promises(
    small_server: LiveServer, label: str, mode: GenerationMode
) -> None:
    _ask_at_random(small_server, label, mode)


@pytest.mark.parametrize("label", ["POST /v1/chat/completions", "POST /v1/completions"])
def test_every_stream_is_one_the_document_promises(small_server: LiveServer, label: str) -> None:
    _ask_at_random(small_server, label, GenerationMode.POSITIVE, stream=True)


def _ask_at_random(server: LiveServer, label: str, mode: GenerationMode, **fields: object) -> None:
    operation = OPERATIONS[label]
    if mode is GenerationMode.NEGATIVE and not operation.body:
        return  # nothing to get wrong

    @given(operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=20 if operation.body else 2, deadline=None, suppress_health_check=list(HealthCheck)
    )
    def ask(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            _make_short(case.body)
            case.body.update(fields)
        response = case.call(base_url=server.url, timeout=120)
        limit = TIME_LIMITS.get(response.status_code)
        if limit is not None and isinstance(case.body, dict) and case.body.get(limit[0]) is not None:
            # The request itself set a time limit too short to be met: saying so is the right answer.
            error = response.json()["error"]
            assert error.get("code", error["type"]) in (limit[1], "timeout_error")
            return
        case.validate_response(response, checks=CHECKS)

    ask()


def _make_short(body: dict[str, Any]) -> None:
    """Two tokens are enough to see whether a request is served; leaves everything invalid as it is."""
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        value = body.get(name)
        # -1 asks for no limit
        if value is None or (isinstance(value, int | float) and (value > 2 or value == -1)):
            body[name] = 2
    for name in ("n", "best_of"):
        if body.get(name) in range(3, 9):
            body[name] = 2
    if isinstance(body.get("min_tokens"), int):
        body["min_tokens"] = min(body["min_tokens"], 2)
    if body.get("model") is not None and isinstance(body["model"], str):
        body["model"] = "smollm2"  # nearly every random name is a 404, which one example would show


def test_the_document_covers_every_route(small_server: LiveServer) -> None:
    with small_server.http as http:
        paths = http.get("/openapi.json").json()["paths"]
        for path, methods in paths.items():
            for method in methods:
                named = path.replace("{name}", "smollm2")
                assert http.request(method, named, content=b"{").status_code not in (404, 405), (method, path)
    assert set(paths) == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        "/v2/rerank",
        "/v1/models",
        "/v1/models/{name}",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/health",
        "/ready",
        "/metrics",
        "/version",
        "/admin/reset_prefix_cache",
        "/admin/tokenizer",
        "/admin/profile",
        "/admin/warmup",
    }
