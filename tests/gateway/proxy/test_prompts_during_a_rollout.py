"""Pods of two revisions of a model, or of two block sizes, at once: each is matched by its own chain."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from leadline.gateway.pods import Pod
from leadline.gateway.policies.prefix import PrefixPolicy
from leadline.gateway.request import prompt as routed_prompt
from leadline.gateway.request.body import Incoming, read_incoming
from leadline.gateway.request.prompt import choose, known_prompt, read_prompt, reported_namespaces
from leadline.gateway.services import Service
from leadline.gateway.tokens.approximate import ApproximateTokens
from leadline.gateway.tokens.service import TokenService
from leadline.protocol.chain import chain, short
from leadline.protocol.events import EventBatch
from leadline.protocol.load import LoadReport
from leadline.protocol.openai import ChatCompletionRequest
from leadline.protocol.text.chat import ChatRenderer
from leadline.protocol.text.tokenizer import Tokenizer
from real_tokenizers import smollm_folder, tokenizer

__all__ = ["smollm_folder", "tokenizer"]

LONG = "The pilot reads the tide table and writes the height of the water down. " * 60
SHORT = LONG[:900]


@pytest.fixture
def service(tokenizer: Tokenizer) -> Iterator[Service]:
    made = Service(name="ns/m", model="", policy=PrefixPolicy())
    made.tokens = TokenService(tokenizer, ChatRenderer(tokenizer.chat_templates, tokenizer.special_tokens))
    made.index.heard(time.monotonic())
    yield made
    made.tokens.close()


def join(service: Service, name: str, revision: str, block_size: int = 16, **report: Any) -> Pod:
    """A pod that has said who it is."""
    pod = Pod(name, f"{name}:8000", "ns/m")
    hear(pod, revision, block_size, **report)
    service.pods[name] = pod
    service.index.pod_seen(name, name)
    return pod


def hear(pod: Pod, revision: str, block_size: int = 16, **report: Any) -> None:
    told = {"pod": pod.id, "address": pod.address, "epoch": pod.id, "time": time.time(), "model": "m"}
    made = LoadReport(
        revision=revision, block_size=block_size, prefill_tokens_per_second=1e3, **told, **report
    )
    pod.heartbeat(made, time.monotonic())


def asks(text: str, **fields: Any) -> Incoming:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
    return read_incoming(json.dumps(body).encode(), ChatCompletionRequest)


def held_by(service: Service, pod: Pod, incoming: Incoming, ids: list[int], blocks: int) -> None:
    """The pod has told that it holds so many leading blocks of the prompt, by the names it has for them."""
    assert pod.report is not None
    namespace = pod.report.namespace(cache_salt=getattr(incoming.full, "cache_salt", None) or "")
    names = [short(one) for one in chain(namespace, ids)][:blocks]
    service.index.batch(EventBatch(epoch=pod.epoch, seq=0, stored=names))


async def ids_of(service: Service, incoming: Incoming) -> list[int]:
    assert isinstance(service.tokens, TokenService)
    assert incoming.full is not None
    report = next(iter(service.pods.values())).report
    assert report is not None
    (prompt,) = await service.tokens.prompts(incoming.full, report)
    assert prompt.ids is not None
    return prompt.ids.tolist()


async def matches(service: Service, incoming: Incoming) -> dict[str, int]:
    """Pod → tokens of the prompt that it holds, as the policy sees it."""
    prompt = known_prompt(service, incoming) or await read_prompt(service, incoming)
    decision, *_ = choose(service, incoming, prompt, list(service.pods.values()), explain=True)
    return {score.pod: score.matched_tokens for score in decision.scores}


@pytest.mark.parametrize("fields", [{}, {"cache_salt": "tenant"}])
@pytest.mark.parametrize("text", [SHORT, LONG])
async def test_a_pod_of_the_new_revision_is_known_by_what_it_holds(
    service: Service, text: str, fields: dict[str, Any]
) -> None:
    old, new = join(service, "old", "r1"), join(service, "new", "r2")
    incoming = asks(text, **fields)
    ids = await ids_of(service, incoming)
    assert await matches(service, incoming) == {"old": 0, "new": 0}
    held_by(service, new, incoming, ids, 8)
    assert await matches(service, incoming) == {"old": 0, "new": 8 * 16}
    held_by(service, old, incoming, ids, 2)
    assert await matches(service, incoming) == {"old": 2 * 16, "new": 8 * 16}
    prompt = known_prompt(service, incoming) or await read_prompt(service, incoming)
    decision, names, held = choose(service, incoming, prompt, [old, new], explain=False)
    assert (decision.pod, held) == (new, 8)
    # What is believed of the pod from now on is called as it calls it.
    service.index.routed(new.id, names, held, time.monotonic())
    held_by(service, new, incoming, ids, 8)
    assert await matches(service, incoming) == {"old": 2 * 16, "new": len(ids) // 16 * 16}


async def test_blocks_of_two_sizes_count_by_their_tokens(service: Service) -> None:
    small, large = join(service, "small", "r1", 16), join(service, "large", "r1", 64)
    incoming = asks(LONG)
    ids = await ids_of(service, incoming)
    held_by(service, small, incoming, ids, 8)
    held_by(service, large, incoming, ids, 4)
    assert await matches(service, incoming) == {"small": 128, "large": 256}


async def test_one_namespace_is_one_chain_and_a_second_comes_and_goes_with_its_pods(service: Service) -> None:
    first = join(service, "a", "r1")
    join(service, "b", "r1", running=3)
    prompt = known_prompt(service, asks(SHORT))
    assert prompt is not None
    assert prompt.names == ()
    late = join(service, "c", "r2")
    hear(first, "r1")  # pods are looked through with its heartbeats
    prompt = known_prompt(service, asks(SHORT))
    assert prompt is not None
    assert [name.report.revision for name in prompt.names] == ["r1", "r2"]
    late.terminating = True
    hear(first, "r1")
    assert len(reported_namespaces(service)) == 1


def test_namespaces_are_few_whatever_pods_report(service: Service) -> None:
    for number in range(9):
        join(service, f"p{number}", f"r{number}")
    assert len(reported_namespaces(service)) == routed_prompt._MAX_NAMESPACES


async def test_text_needs_no_names_of_the_pods(service: Service) -> None:
    assert isinstance(service.tokens, TokenService)
    service.tokens.close()
    service.tokens = ApproximateTokens()
    join(service, "old", "r1")
    new = join(service, "new", "r2")
    incoming = asks(LONG)
    for prompt in (known_prompt(service, incoming), await read_prompt(service, incoming)):
        assert prompt is not None
        assert prompt.names == ()
        decision, names, held = choose(service, incoming, prompt, [new], explain=False)
        assert (decision.pod, names) == (new, prompt.chain)
        service.index.routed(new.id, names, held, time.monotonic())
    assert (await matches(service, incoming))["new"] > 0
