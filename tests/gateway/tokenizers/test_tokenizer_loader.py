"""Which tokens a service is matched by: fetched from pods, exchanged at rollouts, and text with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tokenizing_pod import TokenizingPod, tokenizing_pod

from leadline.gateway.policies.least_load import LeastLoadPolicy
from leadline.gateway.services import Service, ServiceTable
from leadline.gateway.tokenizers import bundles, loader
from leadline.gateway.tokenizers.bundles import TokenPool
from leadline.gateway.tokenizers.loader import TokenizerLoader
from leadline.gateway.tokens.approximate import ApproximateTokens
from leadline.gateway.tokens.mode import ASSUMED_TTL, EVENTS_TTL, ModeMetric, Reason, TokenMode
from leadline.gateway.tokens.parity import ParityReport
from leadline.gateway.tokens.service import TokenService
from live_valkey import until


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(loader, "_FIRST_RETRY", 0.02)
    monkeypatch.setattr(loader, "_LAST_RETRY", 0.05)


@dataclass
class Kept:
    """A service and its loader."""

    service: Service
    task: asyncio.Task[None]
    modes: list[TokenMode] = field(default_factory=list)
    reports: list[ParityReport] = field(default_factory=list)

    @property
    def reason(self) -> Reason | None:
        return self.service.token_mode.reason


@contextlib.asynccontextmanager
async def kept(*, model: str = "", pool: TokenPool | None = None, **options: Any) -> AsyncIterator[Kept]:
    service = Service(name="ns/m", model=model, policy=LeastLoadPolicy())
    service.tokens = ApproximateTokens()
    service.index.guess_for(ASSUMED_TTL)
    modes: list[TokenMode] = []
    reports: list[ParityReport] = []
    async with aiohttp.ClientSession() as session:
        one = TokenizerLoader(
            service,
            pool or TokenPool(),
            session,
            **{"events": True, **options},
            changed=lambda service: modes.append(service.token_mode),
            compared=lambda _, report: reports.append(report),
        )
        task = asyncio.create_task(one.run())
        try:
            yield Kept(service, task, modes, reports)
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def ids_of(kept: Kept, text: str = "Grüße, 12 Leute") -> list[int]:
    assert isinstance(kept.service.tokens, TokenService)
    return kept.service.tokens.tokenizer.encode(text)


async def test_a_service_becomes_exact_once_a_pod_is_ready(smollm_folder: Path) -> None:
    async with tokenizing_pod() as pod, kept() as one:
        digest = pod.run(smollm_folder)
        one.service.pods["pod"] = waiting = pod.as_pod(digest, ready=False)
        assert one.reason is Reason.NO_POD
        index = one.service.index
        index.routed("pod", [1, 2, 3], 0, time.monotonic())
        waiting.ready = True
        await until(lambda: one.service.token_mode.exact)
        assert (pod.fetched, one.reports[-1].agrees) == (1, True)
        assert one.service.index is index  # which the reader of Redis feeds
        assert index.match([1, 2, 3], time.monotonic()) == {}  # what text was called means nothing now
        assert index._speculative.ttl == EVENTS_TTL
        assert ids_of(one) == pod._tokenizer.encode("Grüße, 12 Leute")


async def test_without_heartbeats_a_pod_is_asked_all_the_same(smollm_folder: Path) -> None:
    async with tokenizing_pod() as pod, kept(events=False) as one:
        pod.run(smollm_folder)
        one.service.pods["pod"] = pod.as_pod()
        await until(lambda: one.service.token_mode.exact)
        assert one.service.index._speculative.ttl == ASSUMED_TTL  # no event will tell what the pod holds


async def test_without_heartbeats_a_pod_is_asked_for_its_names(smollm_folder: Path) -> None:
    async with tokenizing_pod() as pod, kept() as one:
        pod.run(smollm_folder)
        pod.names = ["Org/Model.X", "模型"]
        pod.status = 404  # another engine
        one.service.pods["pod"] = pod.as_pod()
        await until(lambda: one.reason is Reason.NOT_OFFERED)
        table = ServiceTable([one.service])
        assert [name for name, _ in table.names()] == ["Org/Model.X", "模型"]
        assert table.resolve("模型") is one.service


async def test_without_heartbeats_a_pod_is_asked_again_now_and_then(
    smollm_folder: Path, sentencepiece_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_ASK_AGAIN", 0.03)
    async with tokenizing_pod() as pod, kept() as one:
        pod.run(smollm_folder)
        one.service.pods["pod"] = pod.as_pod()
        await until(lambda: one.service.token_mode.exact and pod.asked >= 3)
        assert pod.fetched == 1
        before = ids_of(one)
        pod.run(sentencepiece_folder)
        # In between it may be seen to differ from what was fetched before.
        await until(lambda: one.service.token_mode.exact and ids_of(one) != before)


async def test_a_rollout_to_another_model_exchanges_the_tokenizer_when_most_pods_have_it(
    smollm_folder: Path, sentencepiece_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    votes: list[str] = []
    wanted = TokenizerLoader._wanted
    monkeypatch.setattr(
        TokenizerLoader, "_wanted", lambda self, pods: votes.append(wanted(self, pods)) or votes[-1]
    )
    async with tokenizing_pod() as old, tokenizing_pod() as new, kept() as one:
        first, second = old.run(smollm_folder), new.run(sentencepiece_folder)
        pods = one.service.pods
        pods["a"], pods["b"] = old.as_pod(first, "a"), old.as_pod(first, "b")
        await until(lambda: one.service.token_mode.exact)
        before = one.service.tokens
        pods["b"] = new.as_pod(second, "b")  # a tie: the one in use stays
        looks, compared = len(votes), len(one.reports)
        await until(lambda: len(votes) > looks + 3)
        assert (one.service.tokens, new.asked, len(one.reports)) == (before, 0, compared)
        assert set(votes) == {first}
        pods["a"] = new.as_pod(second, "a")
        await until(lambda: one.service.tokens is not before)
        assert one.service.token_mode.exact
        assert ids_of(one) == new._tokenizer.encode("Grüße, 12 Leute")
        # A request that began with the old tokens may still use them.
        assert isinstance(before, TokenService)
        text = "words that nobody has seen, " * 2000
        assert await before._encoder.in_thread(before.tokenizer.encode, text) == old._tokenizer.encode(text)
        assert [mode.exact for mode in one.modes] == [True, True]


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (404, Reason.NOT_OFFERED),
        (405, Reason.NOT_OFFERED),
        (403, Reason.FORBIDDEN),
        (503, Reason.UNREACHABLE),
        (302, Reason.UNREACHABLE),
    ],
)
async def test_a_pod_that_gives_none_leaves_text_and_a_reason_until_it_does(
    smollm_folder: Path, status: int, reason: Reason
) -> None:
    async with tokenizing_pod() as pod, kept() as one:
        digest = pod.run(smollm_folder)
        pod.status = status
        one.service.pods["pod"] = pod.as_pod(digest)
        await until(lambda: pod.asked >= 3)
        assert one.reason is reason
        assert isinstance(one.service.tokens, ApproximateTokens)
        assert len(one.modes) == 1  # told once, not at every try
        pod.status = 200
        await until(lambda: one.service.token_mode.exact)


async def test_a_pod_that_is_not_there_is_unreachable(unused_tcp_port_factory: Any) -> None:
    async with kept() as one:
        pod = TokenizingPod()
        pod.address = f"127.0.0.1:{unused_tcp_port_factory()}"
        one.service.pods["pod"] = pod.as_pod("d" * 32)
        await until(lambda: one.reason is Reason.UNREACHABLE)


async def test_the_key_of_the_pods_is_sent(smollm_folder: Path) -> None:
    async with tokenizing_pod() as pod:
        digest = pod.run(smollm_folder)
        pod.key = "secret"
        async with kept() as one:
            one.service.pods["pod"] = pod.as_pod(digest)
            await until(lambda: one.reason is Reason.FORBIDDEN)
        async with kept(headers={"Authorization": "Bearer secret"}) as one:
            one.service.pods["pod"] = pod.as_pod(digest)
            await until(lambda: one.service.token_mode.exact)


async def test_what_does_not_match_its_digest_is_not_even_parsed(
    smollm_folder: Path, sentencepiece_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TokenPool, "of_bundle", None)
    async with tokenizing_pod() as pod, kept() as one:
        digest = pod.run(smollm_folder)
        damaged = bytearray(pod.bundle)
        damaged[len(damaged) // 2] ^= 1
        pod.bundle = bytes(damaged)
        one.service.pods["pod"] = pod.as_pod(digest)
        await until(lambda: one.reason is Reason.INVALID)
        assert "do not match its digest" in one.service.token_mode.detail
        # Whole, but not what the heartbeat told.
        pod.run(sentencepiece_folder)
        await until(lambda: "but reports" in one.service.token_mode.detail)


async def test_a_bundle_that_is_too_large_is_not_read_to_its_end(
    smollm_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "MAX_BUNDLE_BYTES", 100_000)
    async with tokenizing_pod() as pod, kept() as one:
        digest = pod.run(smollm_folder)
        one.service.pods["pod"] = pod.as_pod(digest)
        await until(lambda: one.reason is Reason.INVALID)
        assert "more than the 100000 bytes" in one.service.token_mode.detail


async def test_bytes_that_are_no_tokenizer_are_invalid() -> None:
    async with tokenizing_pod() as pod, kept() as one:
        pod.bundle = b"\x80\x04cos\nsystem\n"
        pod.tag = bundles.bundle_digest(pod.bundle)
        one.service.pods["pod"] = pod.as_pod(pod.tag)
        await until(lambda: one.reason is Reason.INVALID)
        assert "not a tokenizer bundle" in one.service.token_mode.detail


async def test_a_folder_serves_before_there_is_a_pod_and_yields_to_what_pods_have(
    smollm_folder: Path, sentencepiece_folder: Path
) -> None:
    async with tokenizing_pod() as pod, kept(model=str(smollm_folder)) as one:
        await until(lambda: one.service.token_mode.exact)
        folders = ids_of(one)
        digest = pod.run(sentencepiece_folder)
        one.service.pods["pod"] = pod.as_pod(digest)
        await until(lambda: ids_of(one) != folders)
        assert one.reports[-1].agrees is True


async def test_a_folder_like_the_pods_is_compared_and_nothing_is_fetched(smollm_folder: Path) -> None:
    async with tokenizing_pod() as pod, kept(model=str(smollm_folder)) as one:
        digest = pod.run(smollm_folder)
        one.service.pods["pod"] = pod.as_pod(digest)
        await until(lambda: bool(one.reports))
        assert (one.reports[0].agrees, pod.asked) == (True, 0)


async def test_a_folder_that_differs_from_pods_that_give_none_is_not_trusted(
    smollm_folder: Path, sentencepiece_folder: Path
) -> None:
    """P21: hits would never come, and nothing would say so."""
    async with tokenizing_pod() as pod, kept(model=str(smollm_folder)) as one:
        await until(lambda: one.service.token_mode.exact)
        pod.run(sentencepiece_folder)
        pod.status = 404
        one.service.pods["pod"] = pod.as_pod()
        await until(lambda: one.reason is Reason.DIFFERS)
        assert isinstance(one.service.tokens, ApproximateTokens)
        assert one.service.index._speculative.ttl == ASSUMED_TTL
        pod.run(smollm_folder)
        await until(lambda: one.service.token_mode.exact)


async def test_services_of_one_tokenizer_share_it_and_fetch_it_once(smollm_folder: Path) -> None:
    pool = TokenPool()
    async with tokenizing_pod() as pod, kept(pool=pool) as one, kept(pool=pool) as two:
        digest = pod.run(smollm_folder)
        one.service.pods["pod"] = pod.as_pod(digest)
        await until(lambda: one.service.token_mode.exact)
        two.service.pods["pod"] = pod.as_pod(digest)
        await until(lambda: two.service.token_mode.exact)
        assert one.service.tokens is two.service.tokens
        assert pod.fetched == 1


def test_the_metric_and_the_model_list_tell_the_mode() -> None:
    registry = CollectorRegistry()
    metric = ModeMetric(registry)
    service = Service(name="ns/m", model="", policy=LeastLoadPolicy(), served_names=("m",))
    table = ServiceTable([service])

    def shown() -> dict[str, float]:
        lines = generate_latest(registry).decode().splitlines()
        series = [line.rpartition(" ") for line in lines if line.startswith("leadline_gateway_text_m")]
        return {name.partition('reason="')[2].partition('"')[0]: float(value) for name, _, value in series}

    for mode, told in (
        (TokenMode(), {"by": "text", "reason": "no_pod"}),
        (TokenMode(Reason.DIFFERS, "at token 4"), {"by": "text", "reason": "differs"}),
        (TokenMode(None), {"by": "tokens"}),
    ):
        service.token_mode = mode
        metric.show("ns/m", mode)
        assert sum(shown().values()) == (0 if mode.exact else 1)
        assert mode.exact or shown()[told["reason"]] == 1
        (card,) = table.model_cards()
        assert msgspec.to_builtins(card)["prefix_matching"] == told
    metric.show("ns/m", TokenMode())
    metric.forget("ns/m")
    assert sum(shown().values()) == 0
