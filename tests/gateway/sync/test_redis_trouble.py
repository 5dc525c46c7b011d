"""P15: Redis down at start, dying, hanging, flushed, replaced. Readers and publishers recover by themselves.

Routing (`index.match`) is asked all the while and never raises: it does not touch Redis.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest
import redis
from reading_gateway import QUICK, ReadingGateway, reading

from leadline.cli.valkey import EmbeddedValkey
from leadline.gateway.sync.heartbeats import Heartbeats
from leadline.gateway.sync.redis_sync import RedisSync
from live_valkey import FAST, KEYS, PoolPod, pods, until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def engines(valkey: EmbeddedValkey) -> AsyncIterator[list[PoolPod]]:
    async with pods(valkey, "pod-a", "pod-b") as made:
        yield made


@pytest.fixture
async def gateways(valkey: EmbeddedValkey) -> AsyncIterator[list[ReadingGateway]]:
    made = [ReadingGateway(valkey.url, ["pod-a", "pod-b"]) for _ in range(2)]
    async with reading(*made):
        yield made


async def all_know(gateways: list[ReadingGateway], engines: list[PoolPod]) -> None:
    for gateway in gateways:
        for pod in engines:
            await until(lambda gateway=gateway, pod=pod: gateway.knows(pod))


def match_all(gateway: ReadingGateway, pod: PoolPod) -> int:
    """Blocks of the pod that routing would find now."""
    return sum(gateway.holds(pod.name, block) for block in pod.hashes())


async def test_redis_may_come_after_everybody_else(valkey: EmbeddedValkey) -> None:
    valkey.kill()
    pod, gateway = PoolPod(valkey.url), ReadingGateway(valkey.url)
    try:
        async with reading(gateway):
            assert not await pod.start(patience=0.1)
            pod.work(100)
            await until(lambda: gateway.sync.counts.failures >= 2)
            assert match_all(gateway, pod) == 0
            valkey.restart()
            await until(lambda: gateway.knows(pod))
            assert gateway.sync.counts.connected
    finally:
        await pod.stop()


async def test_redis_may_die_and_come_back_empty(
    valkey: EmbeddedValkey, engines: list[PoolPod], gateways: list[ReadingGateway]
) -> None:
    for pod in engines:
        pod.work(100)
    await all_know(gateways, engines)
    valkey.kill()
    await until(lambda: all(not gateway.sync.counts.connected for gateway in gateways))
    # Routing goes on with what is known.
    assert all(match_all(gateway, pod) == len(pod.hashes()) for gateway in gateways for pod in engines)
    for pod in engines:
        pod.work(100)
    valkey.restart()
    await all_know(gateways, engines)
    for pod in engines:
        pod.work(20)
    await all_know(gateways, engines)


async def test_redis_may_be_flushed_at_any_moment(
    valkey: EmbeddedValkey, engines: list[PoolPod], gateways: list[ReadingGateway]
) -> None:
    server = redis.Redis.from_url(valkey.url)
    for _ in range(5):
        for pod in engines:
            pod.work(30)
        server.flushall()
        for pod in engines:
            pod.work(30)
        await all_know(gateways, engines)
    # No pod was declared dead for it.
    assert all(set(gateway.index._real.pods()) == {"pod-a", "pod-b"} for gateway in gateways)


async def test_redis_may_hang(
    valkey: EmbeddedValkey, engines: list[PoolPod], gateways: list[ReadingGateway]
) -> None:
    for pod in engines:
        pod.work(50)
    await all_know(gateways, engines)
    server = valkey.pid
    os.kill(server, signal.SIGSTOP)
    try:
        for pod in engines:
            pod.work(50)
        await until(lambda: all(gateway.sync.counts.failures >= 2 for gateway in gateways))
        began = time.monotonic()
        for gateway in gateways:
            for pod in engines:
                match_all(gateway, pod)
        assert time.monotonic() - began < 1.0
    finally:
        os.kill(server, signal.SIGCONT)
    await all_know(gateways, engines)


async def test_a_redis_that_may_only_be_read_is_read(valkey: EmbeddedValkey, engines: list[PoolPod]) -> None:
    """A replica, or a user without the right to write: what dead pods left behind stays where it is."""
    server = redis.Redis.from_url(valkey.url)
    server.hset(KEYS.pods, "dead", b"of long ago")
    server.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "~*", "+@read", "+@connection")
    url = valkey.url.replace("unix://:", "unix://reader:").replace(valkey.url.split("@")[0][8:], "secret")
    gateway = ReadingGateway(url, ["pod-a", "pod-b"], heartbeats=Heartbeats(forget_after=0.0))
    async with reading(gateway):
        for _ in range(2):
            for pod in engines:
                pod.work(50)
            await all_know([gateway], engines)
    assert gateway.sync.counts.failures == 0
    assert server.hexists(KEYS.pods, "dead")


async def test_a_gateway_restarted_while_redis_is_empty_learns_all(
    valkey: EmbeddedValkey, engines: list[PoolPod]
) -> None:
    for pod in engines:
        pod.work(100)
    redis.Redis.from_url(valkey.url).flushall()
    gateway = ReadingGateway(valkey.url, ["pod-a", "pod-b"])
    async with reading(gateway):
        await all_know([gateway], engines)


async def test_a_server_whose_clock_is_behind_is_read_from_its_beginning(
    valkey: EmbeddedValkey, engines: list[PoolPod], gateways: list[ReadingGateway]
) -> None:
    """Failover to a server with another clock: the ids of its stream are smaller than those already read."""
    server = redis.Redis.from_url(valkey.url)
    engines[0].work(50)
    await all_know(gateways, engines)
    tomorrow = f"{int((time.time() + 86_400) * 1000)}-0"
    server.xadd(KEYS.events, {"b": b"from the future"}, id=tomorrow)
    await until(lambda: all(gateway.sync.counts.events["garbage"] for gateway in gateways))
    server.delete(KEYS.events)
    for pod in engines:
        pod.work(50)
    await all_know(gateways, engines)
    applied = [gateway.sync.counts.events["applied"] for gateway in gateways]
    engines[1].store(7_000)
    await all_know(gateways, engines)
    # By the stream, not only by a snapshot.
    assert all(
        gateway.sync.counts.events["applied"] > before
        for gateway, before in zip(gateways, applied, strict=True)
    )


async def test_when_redis_stays_away_routing_decays_to_load(valkey: EmbeddedValkey) -> None:
    async with pods(valkey, "pod-a") as (pod,):
        gateway = ReadingGateway(valkey.url, stale_after=1.0)
        async with reading(gateway):
            pod.store(1)
            await until(lambda: gateway.knows(pod))
            valkey.kill()
            await until(lambda: match_all(gateway, pod) == 0)
            # Its own requests are still known, and so is the pod.
            (block,) = pod.hashes()
            gateway.index.routed("pod-a", [block], 0, time.monotonic())
            assert gateway.holds("pod-a", block)
            late = time.monotonic() + 60
            assert gateway.pods["pod-a"].load(late) == (0, 0, None)
            valkey.restart()
            await until(lambda: gateway.knows(pod))


async def test_publishing_and_reading_stop_anywhere_and_start_again(valkey: EmbeddedValkey) -> None:
    """redis-py forgets a cancellation that comes as a command has just been sent (Python 3.11)."""
    busy = dataclasses.replace(FAST, heartbeat_seconds=0.001)
    gateway = ReadingGateway(valkey.url, timing=dataclasses.replace(QUICK, poll_seconds=0.0))
    for number in range(40):
        pod = PoolPod(valkey.url, timing=busy)
        gateway.sync.start()
        assert await pod.start()
        pod.store(number)
        await until(lambda pod=pod: gateway.knows(pod))
        for _ in range(number):
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await pod.stop()
            await gateway.sync.stop()


async def test_the_log_names_the_trouble_once_and_never_the_password(
    valkey: EmbeddedValkey, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    gateway = ReadingGateway(valkey.url.replace("unix://:", "unix://:hunter2"))
    async with reading(gateway):
        await until(lambda: gateway.sync.counts.failures >= 3)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "trying again" in warnings[0].getMessage()
    assert "hunter2" not in caplog.text
    assert valkey.url.split("@")[0].removeprefix("unix://:") not in caplog.text


async def test_a_url_that_cannot_be_read_is_refused_without_showing_it(valkey: EmbeddedValkey) -> None:
    known = ReadingGateway(valkey.url)
    for url in ("http://:hunter2@r", "redis://:hunter2@r:port"):
        with pytest.raises(ValueError, match="not a Redis URL") as caught:
            RedisSync(KEYS, url, known.index, lambda report: None)
        assert "hunter2" not in str(caught.value)
