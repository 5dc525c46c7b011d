"""`/tokenize`, `/detokenize` and `/tokenizer_info` by the gateway's own tokenizer: no pod is asked, and keys
and limits hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from gateway_rig import Rig, gateway_to, ok, pods, until
from test_requests_with_keys import bearer, keys_file

from leadline.gateway.config.settings import ServerConfig
from leadline.gateway.tokens.service import TokenService
from leadline.protocol.load import LoadReport
from leadline.protocol.text.bundle import encode_bundle, load_bundle
from leadline.protocol.text.tokenizer import Tokenizer


def exact(folder: Path) -> dict[str, Any]:
    return {"tokenizer": "auto", "model": str(folder)}


async def loaded(rig: Rig) -> None:
    """Wait for the tokenizer; the pods report their context, as through Redis."""
    service = rig.gateway.table.get("default/m")
    assert service is not None
    await until(lambda: isinstance(service.tokens, TokenService), 60)
    for pod in service.pods.values():
        pod.report = LoadReport(
            pod=pod.id, address=pod.address, epoch="e", time=0.0, model="m", block_size=64, max_model_len=512
        )


async def test_keys_and_limits_hold_and_no_pod_is_asked(tmp_path: Path, model_folder: Path) -> None:
    key, options = keys_file(tmp_path, requests_per_minute=3, models=["m"])
    async with pods(ok) as (pod,), gateway_to(pod.address, service=exact(model_folder), **options) as rig:
        await loaded(rig)
        async with httpx.AsyncClient(base_url=rig.url, timeout=30) as client:
            body = {"model": "m", "prompt": "Hi there"}
            assert (await client.post("/tokenize", json=body)).status_code == 401
            got = await client.post("/tokenize", json=body, headers=bearer(key))
            assert got.json() == {
                "tokens": [26843, 665],
                "count": 2,
                "max_model_len": 512,
                "token_strs": None,
            }
            assert got.headers["x-ratelimit-remaining-requests"] == "2"
            assert got.headers["x-request-id"]
            text = await client.post("/detokenize", json={"tokens": [26843, 665]}, headers=bearer(key))
            assert text.json() == {"prompt": "Hi there"}
            other = await client.post("/tokenize", json=body | {"model": "n"}, headers=bearer(key))
            assert other.status_code == 404
            skips = await client.post("/tokenize", json=body | {"request_id": "r"}, headers=bearer(key))
            assert (skips.status_code, skips.headers["x-leadline-skipped"]) == (200, "request_id")
            assert "x-leadline-skipped" not in got.headers
            refused = await client.post("/detokenize", json={"tokens": [5]}, headers=bearer(key))
            assert refused.status_code == 429
            assert "x-leadline-pod" not in [*got.headers, *text.headers]
            assert (await client.get("/tokenizer_info", headers=bearer(key))).status_code == 404
        await rig.settled()


async def test_the_tokenizers_description_needs_a_switch_and_a_key(
    tmp_path: Path, model_folder: Path
) -> None:
    key, options = keys_file(tmp_path, models=["m"])
    options["config"]["server"] = ServerConfig(tokenizer_info=True)
    async with pods(ok) as (pod,), gateway_to(pod.address, service=exact(model_folder), **options) as rig:
        await loaded(rig)
        async with httpx.AsyncClient(base_url=rig.url, timeout=30) as client:
            assert (await client.get("/tokenizer_info")).status_code == 401
            shown = (await client.get("/tokenizer_info?model=m", headers=bearer(key))).json()
            assert (await client.get("/tokenizer_info?model=n", headers=bearer(key))).status_code == 404
    assert shown["eos_token"] == "<|im_end|>"
    assert shown["chat_template"] == Tokenizer.load(model_folder).chat_template
    assert shown["added_tokens_decoder"]["1"] == "<|im_start|>"


async def test_without_a_tokenizer_there_is_no_description() -> None:
    options = {"config": {"server": ServerConfig(tokenizer_info=True)}}
    async with pods(ok) as (pod,), gateway_to(pod.address, **options) as rig, rig.client() as client:
        got = await client.get("/tokenizer_info")
        assert (got.status_code, got.json()["error"]["code"]) == (404, "no_tokenizer")


def test_a_copy_by_bundle_describes_itself_as_the_original(model_folder: Path) -> None:
    tokenizer = Tokenizer.load(model_folder)
    assert load_bundle(encode_bundle(tokenizer))[0].info() == tokenizer.info()
