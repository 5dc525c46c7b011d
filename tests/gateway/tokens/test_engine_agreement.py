"""The names the gateway gives to blocks are the names the engine gives to them, found out independently."""

from __future__ import annotations

import time

import msgspec

from leadline.engine.config import EngineConfig
from leadline.engine.core_process.engine_core import EngineCore
from leadline.engine.hub import resolve_model
from leadline.engine.messages import CoreRequest
from leadline.engine.sampling_params import SamplingParams
from leadline.gateway.tokens.service import TokenService
from leadline.protocol.chain import short
from leadline.protocol.openai import decode_body
from leadline.protocol.openai.chat import ChatCompletionRequest
from leadline.protocol.openai.service import PrefixChain
from leadline.protocol.text.prompts import prompt_inputs, prompt_token_ids


class Stored:
    """Hears which blocks enter the engine's prefix cache."""

    def __init__(self) -> None:
        self.hashes: list[bytes] = []

    def stored(self, block_hash: bytes) -> None:
        self.hashes.append(block_hash)

    def removed(self, block_hash: bytes) -> None: ...

    def cleared(self) -> None: ...


async def test_the_blocks_an_engine_stores_are_those_the_gateway_expects():
    local = resolve_model("smollm2", progress=False)
    stored = Stored()
    config = EngineConfig(
        model="smollm2", device="cpu", block_size=16, max_model_len=512, num_kv_blocks=64, served_name="alias"
    )
    core = EngineCore(config, local, progress=False, listener=stored)
    service = TokenService.load(local.path)
    identity = PrefixChain(model=local.model_id, revision=local.revision, block_size=16)
    for salt in ("", "tenant"):
        stored.hashes.clear()
        body = {
            "messages": [{"role": "user", "content": "Tell me of the sea and of the ships on it. " * 5}],
            "cache_salt": salt,
        }
        request = decode_body(msgspec.json.encode(body), ChatCompletionRequest)
        (prompt,) = prompt_inputs(request, service.renderer, service.tokenizer)
        core.add_request(
            CoreRequest(
                request_id=f"r{salt}",
                prompt_token_ids=prompt_token_ids(prompt, service.tokenizer),
                sampling=SamplingParams(max_tokens=1, temperature=0.0),
                seed=0,
                arrival=time.monotonic(),
                cache_salt=salt,
            )
        )
        while core.has_work():
            core.step()
        (expected,) = await service.prompts(request, identity)
        assert len(expected.chain) > 3
        assert [short(block) for block in stored.hashes] == expected.chain
    service.close()
