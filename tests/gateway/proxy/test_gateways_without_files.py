"""A gateway without model files, as in a cluster: it asks the engine for the tokenizer, and is exact then.

The engine goes by names that only strings can hold (P17), through engine, load report and gateway alike.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import BLOCK, Engine, engines
from gateway_rig import Rig, gateway_to, until

from leadline.cli.valkey import EmbeddedValkey
from leadline.gateway.services import Service
from leadline.protocol.text.bundle import bundle_digest, encode_bundle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

NAMES = ["m", "Qwen/Qwen3-8B.Instruct", "x" * 200, "模型-É.v2:latest"]


@pytest.fixture(scope="module")
def bus() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey.start() as valkey:
        yield valkey


@pytest.fixture(scope="module")
def engine(bus: EmbeddedValkey, small_model: Path) -> Iterator[Engine]:
    aliases = [f"--alias={name}" for name in NAMES[1:]]
    place = ("--service=default/m", "--pod-name=pod-0", f"--redis-url={bus.url}")
    with engines(1, *place, *aliases, model=str(small_model)) as (one,):
        yield one


@pytest.fixture
async def rig(bus: EmbeddedValkey, engine: Engine) -> AsyncIterator[Rig]:
    """As the chart sets it up: without any setting of the model, not even its names."""
    told: dict[str, Any] = {"tokenizer": "auto", "model": "", "served_names": []}
    async with gateway_to(engine.address, service=told, config={"redis_url": bus.url}) as running:
        yield running


def service_of(rig: Rig) -> Service:
    service = rig.gateway.table.get("default/m")
    assert service is not None
    return service


async def cards(rig: Rig) -> list[dict[str, Any]]:
    async with rig.client() as client:
        data: list[dict[str, Any]] = (await client.get("/v1/models")).json()["data"]
    return data


async def test_the_second_turn_hits_what_was_predicted(rig: Rig) -> None:
    service = service_of(rig)
    await until(lambda: service.token_mode.exact and service.pods["pod-0"].report is not None, 60)
    assert await rig.metric("tokenizer_agrees", service="default/m") == 1
    assert await rig.metric("text_matching", service="default/m") == 0
    assert {str(card["prefix_matching"]) for card in await cards(rig)} == {"{'by': 'tokens'}"}

    talk = [{"role": "user", "content": "You are a careful clerk of the harbour office. " * 12 + "Say yes."}]
    body = {"model": "m", "temperature": 0, "max_tokens": 8, "ignore_eos": True, "messages": talk}
    first = await rig.post(body, headers={"X-Leadline-Explain": "1"})
    assert json.loads(first.headers["x-leadline-explain"])["exact"] is True
    answer = first.json()["choices"][0]["message"]
    body["messages"] = [*talk, answer, {"role": "user", "content": "And now say no."}]
    held = first.json()["usage"]["prompt_tokens"] // BLOCK * BLOCK

    second = await rig.post(body, headers={"X-Leadline-Explain": "1"})
    why = json.loads(second.headers["x-leadline-explain"])
    usage = second.json()["usage"]
    assert why["prompt_tokens"] == usage["prompt_tokens"]
    predicted = why["pods"][0]["matched_tokens"]
    assert predicted >= held > 100
    # The engine may hold the answer's block as well by now, of which it tells a moment later.
    assert predicted <= usage["prompt_tokens_details"]["cached_tokens"] <= predicted + BLOCK
    third = await rig.post(body, headers={"X-Leadline-Explain": "1"})
    matched = json.loads(third.headers["x-leadline-explain"])["pods"][0]["matched_tokens"]
    assert matched == third.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_the_engine_reports_the_digest_of_what_it_gives(rig: Rig, engine: Engine) -> None:
    service = service_of(rig)
    await until(lambda: service.token_mode.exact and service.pods["pod-0"].report is not None, 60)
    report = service.pods["pod-0"].report
    assert report is not None
    async with httpx.AsyncClient(base_url=engine.url) as client:
        given = (await client.get("/admin/tokenizer")).content
    assert report.tokenizer == bundle_digest(given)
    # What the gateway made of it is it.
    assert bundle_digest(encode_bundle(service.tokens.tokenizer)) == report.tokenizer  # type: ignore[union-attr]


async def test_without_redis_the_engine_is_asked_for_names_and_tokenizer(engine: Engine) -> None:
    told: dict[str, Any] = {"tokenizer": "auto", "model": "", "served_names": []}
    async with gateway_to(engine.address, service=told) as rig:
        await until(lambda: service_of(rig).token_mode.exact, 60)
        assert sorted(card["id"] for card in await cards(rig)) == sorted(NAMES)
        talk = [{"role": "user", "content": "The harbour is closed today, and the ships wait outside. " * 8}]
        body = {"model": NAMES[1], "temperature": 0, "max_tokens": 1, "messages": talk}
        first = await rig.post(body)
        again = await rig.post(body, headers={"X-Leadline-Explain": "1"})
        why = json.loads(again.headers["x-leadline-explain"])
        assert why["prompt_tokens"] == first.json()["usage"]["prompt_tokens"]
        assert why["pods"][0]["matched_tokens"] > 0  # what it sent there itself


async def test_any_string_may_name_the_model(rig: Rig) -> None:
    service = service_of(rig)
    await until(lambda: service.pods["pod-0"].report is not None, 60)
    assert sorted(card["id"] for card in await cards(rig)) == sorted(NAMES)
    for name in NAMES:
        for path, ask in (
            ("/v1/completions", {"prompt": "Hi"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ):
            answer = await rig.post({"model": name, "max_tokens": 1, **ask}, path)
            assert answer.status_code == 200, answer.text
    for name in ("M", "qwen/qwen3-8b.instruct", "x" * 63, "模型"):
        refused = await rig.post({"model": name, "prompt": "Hi"}, "/v1/completions")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
