"""Without a tokenizer, requests that begin alike still find the pod that saw the beginning."""

from __future__ import annotations

import msgspec

from leadline.gateway.index.service_index import ServiceIndex
from leadline.gateway.tokens.approximate import BYTES_PER_TOKEN, ApproximateTokens
from leadline.protocol.openai import decode_body
from leadline.protocol.openai.chat import ChatCompletionRequest
from leadline.protocol.openai.completion import CompletionRequest
from leadline.protocol.openai.service import PrefixChain, TokenizeRequest

BLOCK = 64
IDENTITY = PrefixChain(model="m", revision="r", block_size=BLOCK)
LONG = "The sailor sings out the mark and the ship turns away from the shoal. " * 100


def chat(*contents: str, **fields) -> ChatCompletionRequest:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return decode_body(msgspec.json.encode({"messages": messages, **fields}), ChatCompletionRequest)


async def one(request, identity=IDENTITY):
    (prompt,) = await ApproximateTokens().prompts(request, identity)
    return prompt


async def test_the_next_turn_matches_the_turn_before_to_within_a_piece():
    index = ServiceIndex(speculative_ttl=600.0)
    first = await one(chat(LONG))
    index.routed("pod-0", first.chain, 0, now=1.0)
    second = await one(chat(LONG, "An answer.", "A question?"))
    matched = index.match(second.chain, now=2.0)["pod-0"] * BLOCK
    assert first.num_tokens - 2 * BLOCK <= matched <= first.num_tokens


async def test_what_was_learned_is_forgotten_in_time_and_with_the_pod():
    index = ServiceIndex(speculative_ttl=600.0)
    prompt = await one(chat(LONG))
    index.pod_seen("pod-0", "epoch-1")
    index.routed("pod-0", prompt.chain, 0, now=0.0)
    index.routed("pod-1", prompt.chain, 0, now=0.0)
    index.pod_seen("pod-0", "epoch-2")
    assert set(index.match(prompt.chain, now=599.0)) == {"pod-1"}
    assert index.match(prompt.chain, now=601.0) == {}


async def test_estimates_are_near_the_truth_for_english(tokenizer):
    prompt = await one(CompletionRequest(prompt=LONG))
    true = len(tokenizer.encode(LONG))
    assert prompt.ids is None
    assert 0.7 * true < prompt.num_tokens < 1.4 * true
    assert len(prompt.chain) == len(LONG) // (BYTES_PER_TOKEN * BLOCK)


async def test_other_salts_revisions_tools_and_beginnings_share_nothing():
    plain = await one(chat(LONG))
    tool = {"type": "function", "function": {"name": "f"}}
    others = [
        await one(chat(LONG, cache_salt="x")),
        await one(chat(LONG, tools=[tool])),
        await one(chat("!" + LONG)),
        await one(chat(LONG), PrefixChain(model="m", revision="r2", block_size=BLOCK)),
    ]
    for other in others:
        assert set(other.chain).isdisjoint(plain.chain)
    assert (await one(chat(LONG, tools=[tool], tool_choice="none"))).chain == plain.chain


async def test_token_ids_and_several_prompts_are_taken():
    ids = list(range(200))
    exact = await one(CompletionRequest(prompt=ids))
    assert exact.num_tokens == 200
    assert len(exact.chain) == 200 // BLOCK
    several = await ApproximateTokens().prompts(CompletionRequest(prompt=["a", LONG]), IDENTITY)
    assert [len(prompt.chain) for prompt in several] == [0, len(LONG) // (4 * BLOCK)]
    assert (await one(TokenizeRequest(prompt="x"))).num_tokens == 1
    resumed = await one(CompletionRequest(prompt=ids, resume_token_ids=[1, 2]))
    assert resumed.num_tokens == 202
