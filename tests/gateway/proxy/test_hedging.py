"""Hedging: a second pod is asked when the first is slow; the client gets one answer, the other is cut off."""

from __future__ import annotations

import asyncio

import pytest
from gateway_rig import CHAT, STREAM, Received, ScriptedPod, gateway_to, hang, ok, pods, status, until

from leadline.gateway.app import proxy_settings
from leadline.gateway.config.settings import GatewayConfig, UpstreamConfig

SLOW = 0.6
AT_RANDOM = {"policy": "random", "policy_options": {"seed": 1}}
"""Prefix routing would stay with whichever pod it picked first."""


async def slow_ok(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(SLOW)
    await ok(pod, request, writer)


def asked(*scripted: ScriptedPod) -> list[int]:
    return [len(pod.completions) for pod in scripted]


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
async def test_a_slow_pod_gets_a_rival_whose_answer_the_client_gets_once(body: object) -> None:
    async with (
        pods(hang, ok) as (slow, quick),
        gateway_to(slow.address, quick.address, service=AT_RANDOM, hedge_after=0.05) as rig,
    ):
        for _ in range(6):
            response = await rig.post(body)
            assert response.status_code == 200
            assert response.headers["x-leadline-pod"] == "pod-1"
            assert response.text.count("Hi") <= 1
        await rig.settled()
        assert len(quick.completions) == 6
        assert await rig.metric("retries_total", reason="hedge") == len(slow.completions) > 0


async def test_the_first_pod_wins_when_its_rival_is_slower() -> None:
    async with (
        pods(slow_ok, hang) as (first, other),
        gateway_to(first.address, other.address, hedge_after=0.05) as rig,
    ):
        response = await rig.post(CHAT)
        assert response.status_code == 200
        assert response.headers["x-leadline-pod"] == "pod-0"
        await rig.settled()
        assert asked(first, other) == [1, 1]


async def test_a_pod_that_answers_in_time_gets_no_rival() -> None:
    async with pods(ok, ok) as (a, b), gateway_to(a.address, b.address, hedge_after=30.0) as rig:
        for _ in range(5):
            assert (await rig.post(CHAT)).status_code == 200
        assert sum(asked(a, b)) == 5
        assert await rig.metric("retries_total", reason="hedge") == 0


async def test_without_the_setting_nobody_is_asked_twice() -> None:
    async with pods(slow_ok, slow_ok) as (a, b), gateway_to(a.address, b.address) as rig:
        assert (await rig.post(CHAT)).status_code == 200
        assert sum(asked(a, b)) == 1


async def test_when_both_refuse_the_client_gets_the_refusal_and_all_counts_are_zero() -> None:
    async def refuse_late(pod: ScriptedPod, request: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)
        await status(429, "Retry-After: 7")(pod, request, writer)

    async with (
        pods(refuse_late, refuse_late) as (a, b),
        gateway_to(a.address, b.address, hedge_after=0.05) as rig,
    ):
        response = await rig.post(CHAT)
        assert (response.status_code, response.headers["retry-after"]) == (429, "7")
        assert asked(a, b) == [1, 1]
        await rig.settled()


async def test_a_client_that_leaves_cuts_both_attempts_off() -> None:
    async with pods(hang, hang) as (a, b), gateway_to(a.address, b.address, hedge_after=0.05) as rig:
        async with rig.client() as client:
            request = asyncio.ensure_future(client.post("/v1/chat/completions", json=CHAT))
            await until(lambda: asked(a, b) == [1, 1])
            request.cancel()
        await rig.settled()


def test_hedging_is_set_in_the_configuration() -> None:
    assert proxy_settings(GatewayConfig()).hedge_after == 0.0
    asked_for = GatewayConfig(upstream=UpstreamConfig(hedge_after_seconds=1.5))
    assert proxy_settings(asked_for).hedge_after == 1.5
