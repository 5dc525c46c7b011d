"""Embeddings and reranking through the gateway: clients that people use, and the engine's own answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cohere
import httpx
import openai
import pytest
from engines import Engine, engines
from gateway_rig import gateway_to, until
from langchain_openai import OpenAIEmbeddings
from test_engine_and_gateway_agree import Row, told

from tiny_encoders import real_encoder, write_model

EMBED, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"


@pytest.fixture(scope="module")
def embedder() -> Iterator[Engine]:
    with engines(1, "--max-model-len=256", model=str(real_encoder())) as (one,):
        yield one


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("cross")
    write_model(folder, "BertForSequenceClassification", num_labels=1)
    with engines(1, "--max-model-len=64", model=str(folder)) as (one,):
        yield one


def post(path: str, status: int, **fields: Any) -> Row:
    return "POST", path, json.dumps({"model": "m"} | fields).encode(), status


def embed(status: int, **fields: Any) -> Row:
    return post(EMBED, status, **{"input": "a river"} | fields)


def rerank(status: int, **fields: Any) -> Row:
    return post(RERANK, status, **{"query": "w1", "documents": ["w2", {"text": "w3"}]} | fields)


OF_EMBEDDINGS = [
    *(("POST", EMBED, body, 400) for body in (b"", b"{", b"[]", b"{}", b"null", b"\xff")),
    *(embed(200, input=given) for given in ("a", ["a", "b"], [5, 6.0], [[5], [6, 7]], ["a"] * 2048)),
    *(embed(400, input=given) for given in ("", [], [""], [[]], None, 5, ["a", 5], ["a", [5]], [[5], 5])),
    *(embed(400, input=given) for given in ([-1], [1.5], [1_000_000], [[5], [1_000_000]], ["a"] * 2049)),
    *(embed(400, input=given) for given in ("word " * 300, ["a", "word " * 300], [5] * 257)),
    *(embed(200, input=given, truncate_prompt_tokens=-1) for given in ("word " * 300, [5] * 257)),
    *(embed(400, truncate_prompt_tokens=value) for value in (0, -2, 2, "5")),
    *(embed(200, encoding_format=value) for value in ("float", "base64", None)),
    *(embed(400, encoding_format=value) for value in ("int8", 5)),
    *(embed(200, dimensions=value) for value in (1, 384, 7.0, None)),
    *(embed(400, dimensions=value) for value in (0, -1, 385, "5", 1.5)),
    *(
        embed(400, **fields)
        for fields in ({"prompt_name": "query"}, {"user": 5}, {"priority_class": "royal"})
    ),
    *(embed(400, **fields) for fields in ({"deadline": -1}, {"queue_timeout": -1}, {"priority": "x"})),
    embed(200, priority=1, user="u", n="ignored", stream=True, unknown={"deep": [1]}),
    embed(200, deadline=60, queue_timeout=60, priority_class="batch"),
    *(embed(404, model=name) for name in ("other", "")),
    embed(200, model=None),
    embed(400, model=5),
    ("GET", EMBED, b"", 405),
    post("/v1/embedding", 404, input="a"),
    *(
        post(path, 404, **fields)
        for path, fields in (
            (RERANK, {"query": "a", "documents": ["b"]}),
            (SCORE, {"text_1": "a", "text_2": "b"}),
            ("/v1/completions", {"prompt": "Hi"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
            ("/v1/responses", {"input": "Hi"}),
            ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}),
            ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi"}]}),
        )
    ),
    post("/tokenize", 200, prompt="a river"),
]
OF_RERANKING = [
    *(("POST", path, body, 400) for path in (RERANK, SCORE) for body in (b"", b"{", b"[]", b"{}")),
    rerank(200),
    *(rerank(200, top_n=value) for value in (1, 99, None)),
    *(rerank(400, top_n=value) for value in (0, -1, "1")),
    *(rerank(400, documents=given) for given in ([], "w1", [5], [""], [{"title": "w1"}], ["w1"] * 2049)),
    *(rerank(400, query=given) for given in ("", None, ["w1"])),
    *(rerank(400, **fields) for fields in ({"return_documents": 5}, {"instruction": "Judge"})),
    rerank(400, documents=["w1 " * 99]),
    rerank(400, query="w1 " * 99, truncate_prompt_tokens=-1),
    rerank(200, documents=["w1 " * 99], truncate_prompt_tokens=-1),
    rerank(404, model="other"),
    post("/v2/rerank", 200, query="w1", documents=["w2"]),
    *(
        post(SCORE, 200, text_1=one, text_2=two)
        for one, two in (("w1", "w2"), ("w1", ["w2", "w3"]), (["w1"], ["w2"]))
    ),
    *(
        post(SCORE, 400, text_1=one, text_2=two)
        for one, two in ((["w1", "w2"], "w3"), ("", "w3"), ("w1", []))
    ),
    post(EMBED, 404, input="w1"),
    post("/v1/completions", 404, prompt="w1"),
]
OF_GENERATION = [
    post(EMBED, 404, input="a"),
    post(EMBED, 400, prompt="a"),
    post(RERANK, 404, query="a", documents=["b"]),
    post(SCORE, 404, text_1="a", text_2="b"),
]


async def differences(engine: Engine, rows: list[Row]) -> list[tuple[Any, ...]]:
    """Rows that engine and gateway do not answer alike, with the status of the row."""
    found = []
    async with gateway_to(engine.address) as rig, httpx.AsyncClient(timeout=60) as client:
        for method, path, body, status in rows:
            there = await client.request(method, engine.url + path, content=body)
            here = await client.request(method, rig.url + path, content=body)
            what = f"{method} {path} {body[:100]!r} … {len(body)}"
            if not there.status_code == here.status_code == status:
                found.append((what, status, there.status_code, here.status_code, here.text[:200]))
            elif status >= 400 and told(there) != told(here):
                found.append((what, told(there), told(here), here.text[:200]))
        await rig.settled()
    return found


@pytest.mark.parametrize(
    ("name", "rows"),
    [("embedder", OF_EMBEDDINGS), ("reranker", OF_RERANKING), ("engine", OF_GENERATION)],
)
async def test_an_odd_request_has_one_status(
    name: str, rows: list[Row], request: pytest.FixtureRequest
) -> None:
    found = await differences(request.getfixturevalue(name), rows)
    assert not found, "\n".join(map(str, found))


async def test_the_gateway_s_own_tokenizer_changes_nothing(embedder: Engine) -> None:
    """With a folder, as `leadline up` gives one, chats are not rendered for a model that embeds."""
    exact = {"tokenizer": "auto", "model": str(real_encoder())}
    async with gateway_to(embedder.address, service=exact) as rig, httpx.AsyncClient() as client:
        service = rig.gateway.table.get("default/m")
        assert service is not None
        await until(lambda: service.task == "embed" and service.token_mode.exact, 60)
        chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        answer = await client.post(rig.url + "/v1/chat/completions", json=chat)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "task_not_served")
        (card,) = (await client.get(rig.url + "/v1/models")).json()["data"]
        assert card["task"] == "embed"
        assert "prefix_matching" not in card


async def test_clients_of_openai_and_langchain_get_the_engine_s_vectors(embedder: Engine) -> None:
    texts = ["a river", "a city"]

    def ask(url: str) -> None:
        expected = httpx.post(embedder.url + EMBED, json={"input": texts}).json()
        vectors = [one["embedding"] for one in expected["data"]]
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        by_default = client.embeddings.create(model="m", input=texts)
        as_floats = client.embeddings.create(model="m", input=texts, encoding_format="float")
        for answer in (by_default, as_floats):
            assert [one.embedding for one in answer.data] == vectors
            assert answer.usage.total_tokens == expected["usage"]["total_tokens"] == 8
        with pytest.raises(openai.NotFoundError, match="embeds texts: use /v1/embeddings"):
            client.completions.create(model="m", prompt="Hi")
        chain = OpenAIEmbeddings(model="m", base_url=url, api_key="none", check_embedding_ctx_length=False)
        assert chain.embed_documents(texts) == vectors
        assert chain.embed_query(texts[1]) == pytest.approx(vectors[1], abs=1e-6)

    async with gateway_to(embedder.address) as rig:
        await asyncio.to_thread(ask, f"{rig.url}/v1")
    await asyncio.to_thread(ask, f"{embedder.url}/v1")


async def test_cohere_s_client_reranks(reranker: Engine) -> None:
    documents = ["w3 w4", "w1 w2", "w60"]
    body = {"query": "w1", "documents": documents}

    def ask(url: str) -> None:
        plain = httpx.post(url + RERANK, json=body | {"top_n": 2}).json()["results"]
        assert [one["document"]["text"] for one in plain] == [documents[one["index"]] for one in plain]
        pairs = httpx.post(url + SCORE, json={"text_1": "w1", "text_2": documents}).json()["data"]
        scores = sorted(((one["score"], one["index"]) for one in pairs), reverse=True)
        assert [(one["relevance_score"], one["index"]) for one in plain] == scores[:2]
        client = cohere.ClientV2(api_key="none", base_url=url)
        answer = client.rerank(model="m", **body)
        assert [(one.relevance_score, one.index) for one in answer.results] == scores

    async with gateway_to(reranker.address) as rig:
        await asyncio.to_thread(ask, rig.url)
    await asyncio.to_thread(ask, reranker.url)


async def test_requests_are_explained_counted_and_charged_by_their_usage(
    embedder: Engine, tmp_path: Path
) -> None:
    async with gateway_to(embedder.address) as rig, httpx.AsyncClient() as client:
        answer = await client.post(
            rig.url + EMBED, json={"input": ["x"] * 3}, headers={"X-Leadline-Explain": "1"}
        )
        explained = json.loads(answer.headers["x-leadline-explain"])
        assert (explained["pod"], explained["exact"]) == ("pod-0", False)
        await rig.settled()
        text = (await client.get(rig.url + "/metrics")).text
        assert 'leadline_gateway_prompt_tokens_total{service="default/m"} 9.0' in text
