"""Responses that the gateway stores: found by id and by item, by their tenant only, for a time."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis
from gateway_rig import STREAM_HEAD, Received, ScriptedPod, answer, chunked, gateway_to, pods, until

from leadline.cli.valkey import EmbeddedValkey
from leadline.gateway.access.key_file import key_entry
from leadline.gateway.config.settings import ResponsesConfig
from leadline.gateway.errors import ConfigError
from leadline.gateway.proxy.access_log import AccessLog
from leadline.gateway.stored_responses import ResponseStore, StoreDown, UnknownResponse, _index
from leadline.protocol.http.exchange import BodyTooLarge
from valkey_with_users import ValkeyWithUsers


def response(number: int) -> dict[str, Any]:
    part = {"type": "output_text", "text": f"Answer {number}.", "annotations": [], "logprobs": []}
    item = {"type": "message", "id": f"msg_{number}", "status": "completed", "role": "assistant"}
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": "m",
        "output": [{**item, "content": [part]}],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5},
    }


async def responding(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
    """Answers number 1, 2 and so on."""
    made = response(len(pod.completions))
    if not request.json.get("stream"):
        writer.write(answer(json.dumps(made).encode()))
        return
    done = {"type": "response.completed", "response": made, "sequence_number": 0}
    event = f"event: response.completed\ndata: {json.dumps(done)}\n\n".encode()
    writer.write(STREAM_HEAD + chunked(event) + b"0\r\n\r\n")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Valkey with the chart's users, by its URL for gateways."""
    with ValkeyWithUsers(tmp_path_factory.mktemp("valkey")) as server:
        yield server.gateway_url


@asynccontextmanager
async def storing(
    url: str, folder: Path, **fields: Any
) -> AsyncIterator[tuple[ScriptedPod, openai.AsyncOpenAI, openai.AsyncOpenAI]]:
    """A pod, and the clients of two tenants of a gateway that stores responses."""
    made = [key_entry(tenant, tenant=f"{tenant} of {folder.name}") for tenant in ("one", "two")]
    (folder / "keys.yaml").write_text("keys:\n" + "".join(entry for _, entry in made))
    config = {
        "redis_url": url,
        "keys_file": str(folder / "keys.yaml"),
        "responses": ResponsesConfig(store_seconds=60, **fields),
    }
    async with pods(responding) as (pod,), gateway_to(pod.address, config=config) as rig:
        options: dict[str, Any] = {"base_url": f"{rig.url}/v1", "max_retries": 0, "timeout": 20}
        clients = [openai.AsyncOpenAI(api_key=key, **options) for key, _ in made]
        yield pod, clients[0], clients[1]
        for client in clients:
            await client.close()


async def test_a_conversation_goes_on_by_the_id_of_its_last_response(guarded: str, tmp_path: Path) -> None:
    async with storing(guarded, tmp_path) as (pod, client, stranger):
        first = await client.responses.create(model="m", input="a", instructions="Be brief.")
        stream = await client.responses.create(
            model="m", input="b", previous_response_id=first.id, store=True, stream=True
        )
        assert [event.type async for event in stream] == ["response.completed"]
        last = await client.responses.create(model="m", input="c", previous_response_id="resp_2")
        sent = pod.completions[-1].json
        texts = [item["content"][0]["text"] for item in sent["input"]]
        assert texts == ["a", "Answer 1.", "b", "Answer 2.", "c"]
        assert (sent["previous_response_id"], sent["resolved_response_id"]) == (None, "resp_2")
        assert "instructions" not in sent

        assert (await client.responses.retrieve(last.id)).output_text == "Answer 3."
        items = (await client.responses.input_items.list(last.id)).data
        assert [item.type for item in items] == ["message"] * 5

        for ask in (
            stranger.responses.retrieve(last.id),
            stranger.responses.delete(last.id),
            stranger.responses.input_items.list(last.id),
            stranger.responses.create(model="m", input="d", previous_response_id=last.id),
            stranger.responses.create(model="m", input=[{"type": "item_reference", "id": "msg_3"}]),
        ):
            with pytest.raises(openai.NotFoundError) as refused:
                await ask
            assert refused.value.code == "response_not_found"
        await client.responses.delete(last.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(last.id)
        assert len(pod.completions) == 3


async def test_an_item_is_found_by_its_id(guarded: str, tmp_path: Path) -> None:
    async with storing(guarded, tmp_path) as (pod, client, _):
        await client.responses.create(model="m", input="a")
        asked: Any = [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "msg_1"}]
        await client.responses.create(model="m", input=[*asked, {"role": "user", "content": "b"}])
        assert pod.completions[-1].json["input"][1] == response(1)["output"][0]
        short: Any = [{"id": "msg_1"}, {"role": "user", "content": "b"}]
        await client.responses.create(model="m", input=short)
        assert pod.completions[-1].json["input"][0] == response(1)["output"][0]


async def test_a_key_in_x_api_key_finds_its_responses(guarded: str, tmp_path: Path) -> None:
    async with storing(guarded, tmp_path) as (_, client, stranger):
        for key, status in ((client.api_key, 200), (stranger.api_key, 404)):
            async with httpx.AsyncClient(base_url=str(client.base_url), headers={"x-api-key": key}) as plain:
                await plain.post("responses", json={"model": "m", "input": "a", "store": status == 200})
                for path in ("responses/resp_1", "responses/resp_1/input_items"):
                    assert (await plain.get(path)).status_code == status


async def test_references_stand_for_no_more_than_a_body_may_hold(valkey: EmbeddedValkey) -> None:
    store = ResponseStore(valkey.url, ResponsesConfig(store_seconds=50))
    await store.keep("t", [], json.dumps(response(1)).encode())
    body = json.dumps({"input": [{"type": "item_reference", "id": "msg_1"}] * 10}).encode()
    fields: Any = await store.resolve(body, "t", 10_000)
    assert fields["input"] == response(1)["output"] * 10
    with pytest.raises(BodyTooLarge):
        await store.resolve(body, "t", 1000)
    await store.close()


async def test_a_response_to_odd_json_is_stored_and_a_nested_body_is_left_alone(
    valkey: EmbeddedValkey,
) -> None:
    store = ResponseStore(valkey.url, ResponsesConfig(store_seconds=50))
    made = {**response(1), "tools": [{"parameters": {"maximum": 10**30}}]}
    await store.keep("odd", [{"role": "user", "content": "a", "extra": -(10**20)}], json.dumps(made).encode())
    found = await store.get("odd", "resp_1")
    assert (found.response, found.input[0]["extra"]) == (made, -(10**20))
    nested = b'{"previous_response_id": "resp_1", "input": [' + b"[" * 100_000
    assert await store.resolve(nested, "odd", 1 << 20) == {}
    await store.close()


async def test_what_is_not_to_be_stored_or_too_large_is_not(guarded: str, tmp_path: Path) -> None:
    async with storing(guarded, tmp_path, max_bytes=2000) as (_, client, _):
        await client.responses.create(model="m", input="a", store=False)
        await client.responses.create(model="m", input="a" * 2000)
        await client.responses.create(model="m", input="a")
        for name, found in (("resp_1", False), ("resp_2", False), ("resp_3", True)):
            if found:
                await client.responses.retrieve(name)
            else:
                with pytest.raises(openai.NotFoundError):
                    await client.responses.retrieve(name)


async def test_the_newest_responses_of_a_tenant_are_kept_and_all_expire(valkey: EmbeddedValkey) -> None:
    store = ResponseStore(valkey.url, ResponsesConfig(store_seconds=50, max_per_tenant=2))
    for number in (1, 2, 3):
        await store.keep("t", [], json.dumps(response(number)).encode())
    with pytest.raises(UnknownResponse):
        await store.get("t", "resp_1")
    assert (await store.get("t", "resp_3")).response == response(3)
    keys = redis.Redis.from_url(valkey.url)
    assert all(0 < keys.ttl(key) <= 50 for key in keys.keys("leadline:*"))
    await store.close()


async def test_a_redis_that_is_down_stores_nothing_and_is_a_503_where_it_must_be_read() -> None:
    store = ResponseStore("redis://127.0.0.1:1/0", ResponsesConfig(store_seconds=50))
    await store.keep("t", [], json.dumps(response(1)).encode())
    with pytest.raises(StoreDown):
        await store.resolve(b'{"input": "a", "previous_response_id": "resp_1"}', "t", 1 << 20)
    await store.close()


async def test_without_the_setting_the_answers_say_how_to_store_responses() -> None:
    async with pods(responding) as (pod,), gateway_to(pod.address) as rig:
        client = openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="any", max_retries=0)
        await client.responses.create(model="m", input="a", store=True)
        for ask in (client.responses.retrieve("resp_1"), client.responses.delete("resp_1")):
            with pytest.raises(openai.NotFoundError, match=r"responses\.store_seconds"):
                await ask
        await client.close()


async def test_storing_needs_a_redis() -> None:
    with pytest.raises(ConfigError, match=r"responses\.store_seconds"):
        async with gateway_to("127.0.0.1:1", config={"responses": ResponsesConfig(store_seconds=1)}):
            pass


async def test_a_redis_that_hangs_delays_one_answer_and_is_left_alone_for_a_while() -> None:
    now, tries = [100.0], []

    class Hanging:
        """Both ways in which the store asks it end as a timeout does."""

        def pipeline(self, transaction: bool) -> None:
            tries.append("keep")
            raise redis.exceptions.TimeoutError

        async def get(self, key: str) -> None:
            tries.append("get")
            raise redis.exceptions.TimeoutError

    store = ResponseStore("redis://127.0.0.1:1", ResponsesConfig(store_seconds=60), lambda: now[0])
    store._redis = Hanging()  # type: ignore[assignment]
    made = json.dumps(response(1)).encode()
    for _ in range(3):
        await store.keep("t", [], made)
        with pytest.raises(StoreDown):
            await store.get("t", "resp_1")
    assert tries == ["keep"]
    now[0] += 11
    with pytest.raises(StoreDown):
        await store.get("t", "resp_1")
    assert tries == ["keep", "get"]


async def test_a_redis_that_refuses_a_write_is_read_all_the_same(valkey: EmbeddedValkey) -> None:
    store = ResponseStore(valkey.url, ResponsesConfig(store_seconds=60))
    await store.keep("refused", [], json.dumps(response(1)).encode())
    keys = redis.Redis.from_url(valkey.url)
    index = _index("refused")
    keys.set(index, "no sorted set")  # as when the memory is full, the answer to a write is an error
    await store.keep("refused", [], json.dumps(response(2)).encode())
    assert (await store.get("refused", "resp_1")).response["id"] == "resp_1"
    keys.delete(index)
    await store.close()


async def test_reading_and_deleting_count_as_requests_of_the_key(
    valkey: EmbeddedValkey, tmp_path: Path
) -> None:
    key, entry = key_entry("one", requests_per_minute=3)
    (tmp_path / "keys.yaml").write_text("keys:\n" + entry)
    config = {
        "redis_url": valkey.url,
        "keys_file": str(tmp_path / "keys.yaml"),
        "responses": ResponsesConfig(store_seconds=60),
    }
    async with pods(responding) as (pod,), gateway_to(pod.address, config=config) as rig:
        out = io.BytesIO()
        rig.gateway.access_log = AccessLog(out)
        limits = rig.gateway.limits
        await until(
            lambda: limits is not None and limits.shared
        )  # else the first request is counted here, and the next in Redis
        async with httpx.AsyncClient(base_url=rig.url, headers={"Authorization": f"Bearer {key}"}) as client:
            made = (await client.post("/v1/responses", json={"model": "m", "input": "Hi"})).json()
            path = f"/v1/responses/{made['id']}"
            got = await client.get(path)
            assert got.headers["x-ratelimit-remaining-requests"] == "1"
            assert (await client.delete(path)).status_code == 200
            refused = await client.get(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert (await client.get(path, headers={"Authorization": "Bearer no"})).status_code == 401
        rig.gateway.access_log.flush()
        lines = [json.loads(line) for line in out.getvalue().splitlines()]
        assert [(line["method"], line["path"], line["status"], line["key"]) for line in lines] == [
            ("GET", path, 200, "one"),
            ("DELETE", path, 200, "one"),
            ("GET", path, 429, "one"),
            ("GET", path, 401, None),
        ]
        await rig.settled()
