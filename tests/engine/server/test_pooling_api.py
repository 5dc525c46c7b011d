"""The APIs of models that embed and rerank, at an engine as users run it."""

from __future__ import annotations

import base64
import http.client
import json
import struct
from collections.abc import Iterator

import httpx
import pytest
from live_server import LiveServer, serving
from test_api_page import printed_by

from tiny_encoders import real_encoder

EMBEDDINGS = "/v1/embeddings"


@pytest.fixture(scope="module")
def embedder() -> Iterator[LiveServer]:
    with serving(
        real_encoder(), "--max-model-len=256", "--served-name=minilm", "--alias=text-embedding-3-small"
    ) as live:
        yield live


def test_the_examples_of_the_page_run(embedder: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    (printed,) = printed_by("embeddings.md", embedder, capsys)
    assert printed == "2 384 13"


def test_numbers_and_base64_are_the_same_vector(embedder: LiveServer) -> None:
    body = {"input": ["a river", "a city"], "dimensions": 5}
    numbers, packed = (
        [one["embedding"] for one in embedder.post(EMBEDDINGS, **body, encoding_format=form).json()["data"]]
        for form in ("float", "base64")
    )
    assert [list(struct.unpack("<5f", base64.b64decode(one))) for one in packed] == numbers
    assert all(abs(sum(x * x for x in one) - 1) < 1e-5 for one in numbers)


def test_the_card_names_the_task_and_metrics_count_requests(embedder: LiveServer) -> None:
    first, _ = embedder.http.get("/v1/models").json()["data"]
    assert (first["id"], first["task"], first["max_model_len"]) == ("minilm", "embed", 256)
    assert "prefix_chain" not in first
    tokens, requests = (
        embedder.metric("prompt_tokens_total"),
        embedder.metric("requests_total", endpoint="embeddings"),
    )
    answer = embedder.post(EMBEDDINGS, model="text-embedding-3-small", input=["x"] * 3).json()
    assert answer["model"] == "minilm"
    assert answer["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    assert embedder.metric("prompt_tokens_total") == tokens + 9
    assert embedder.metric("requests_total", endpoint="embeddings") == requests + 1
    assert embedder.http.get("/ready").status_code == embedder.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        (
            "/v1/messages",
            {"model": "minilm", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]},
        ),
        ("/v1/messages/count_tokens", {"model": "minilm", "messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/admin/warmup", {"prompts": ["Hi"]}),
    ],
)
def test_another_task_is_a_404_that_says_what_the_model_does(
    embedder: LiveServer, path: str, body: dict[str, object]
) -> None:
    answer = embedder.post(path, **body)
    assert answer.status_code == 404
    assert "the model 'minilm' embeds texts: use /v1/embeddings" in answer.json()["error"]["message"]


def test_a_model_that_generates_embeds_nothing(small_server: LiveServer) -> None:
    answer = small_server.post(EMBEDDINGS, input="a")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("task_not_served", "model")
    assert "generates text: use /v1/chat/completions" in error["message"]


def test_one_text_overtakes_hundreds_and_a_client_that_leaves_stops_its_request(
    embedder: LiveServer,
) -> None:
    large = http.client.HTTPConnection(httpx.URL(embedder.url).netloc.decode())
    large.request("POST", EMBEDDINGS, json.dumps({"input": ["word " * 60] * 500}))
    embedder.until(lambda: embedder.metric("queued_prefill_tokens") > 10_000)
    assert embedder.post(EMBEDDINGS, input="a river").status_code == 200
    assert embedder.metric("queued_prefill_tokens") > 1000  # the large one is not done
    large.close()
    embedder.until(
        lambda: embedder.metric("queued_prefill_tokens") == embedder.metric("running_requests") == 0
    )
    assert embedder.metric("requests_total", endpoint="embeddings", outcome="abort") == 1
