"""Real pools and publishers, a real Valkey, real readers: the index ends up equal to the pools."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time

import pytest
import redis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from reading_gateway import ReadingGateway, reading

from leadline.cli.valkey import EmbeddedValkey
from leadline.gateway.pods import Pod
from leadline.gateway.sync.heartbeats import Heartbeats, find_in
from leadline.protocol.load import LoadReport, encode_report
from live_valkey import FAST, KEYS, PoolPod, block_hash, pods, until

pytestmark = pytest.mark.timeout(120)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    # Every failing example waits its time out: shrinking would take an hour.
    phases=[Phase.explicit, Phase.generate],
)
@given(
    seed=st.integers(0, 1 << 30),
    rounds=st.lists(st.sampled_from(["work", "pause", "join", "trim"]), min_size=3, max_size=15),
)
def test_whatever_pools_do_every_gateway_ends_up_knowing_what_they_hold(
    valkey: EmbeddedValkey, seed: int, rounds: list[str]
) -> None:
    """Gateways join at any time, while events keep coming, and the stream may lose its head."""
    server = redis.Redis.from_url(valkey.url)
    server.flushall()

    async def scenario() -> None:
        rng = random.Random(seed)
        async with pods(valkey, "pod-a", "pod-b") as engines:
            gateways = [ReadingGateway(valkey.url, ["pod-a", "pod-b"])]
            async with reading(*gateways):
                late: list[ReadingGateway] = []
                try:
                    for action in rounds:
                        match action:
                            case "work":
                                for _ in range(10):
                                    rng.choice(engines).work(rng.randrange(1, 20))
                                    await asyncio.sleep(0)
                            case "pause":
                                await until(lambda: not any(pod.publisher._log.pending for pod in engines))
                            case "join":
                                late.append(ReadingGateway(valkey.url, ["pod-a", "pod-b"]))
                                late[-1].sync.start()
                            case "trim":
                                server.xtrim(KEYS.events, maxlen=rng.randrange(3), approximate=False)
                    for gateway in gateways + late:
                        for pod in engines:
                            await until(lambda gateway=gateway, pod=pod: gateway.knows(pod))
                finally:
                    for gateway in late:
                        await gateway.sync.stop()

    asyncio.run(scenario())


async def test_a_gateway_that_joins_while_events_keep_coming_loses_none(valkey: EmbeddedValkey) -> None:
    async with pods(valkey, "pod-a", "pod-b") as engines:
        stop = asyncio.Event()

        async def keep_working() -> None:
            while not stop.is_set():
                for pod in engines:
                    pod.work(3)
                await asyncio.sleep(0.002)

        working = asyncio.create_task(keep_working())
        await until(lambda: all(pod.publisher.counts.batches > 20 for pod in engines))
        gateways = [ReadingGateway(valkey.url, ["pod-a", "pod-b"]) for _ in range(2)]
        async with reading(*gateways):
            await until(lambda: all(gateway.sync.counts.events["applied"] > 100 for gateway in gateways))
            assert all(gateway.index.gaps == 0 for gateway in gateways)
            stop.set()
            await working
            for gateway in gateways:
                for pod in engines:
                    await until(lambda gateway=gateway, pod=pod: gateway.knows(pod))


async def test_an_event_is_known_within_a_fraction_of_a_second(valkey: EmbeddedValkey) -> None:
    async with pods(valkey, "pod-a") as (pod,):
        gateway = ReadingGateway(valkey.url)
        async with reading(gateway):
            await until(lambda: gateway.knows(pod))
            delays = []
            for number in range(20):
                began = time.monotonic()
                pod.store(1_000 + number)
                await until(lambda: gateway.knows(pod))
                delays.append(time.monotonic() - began)
            assert sorted(delays)[10] < 0.3
            assert gateway.sync.counts.lag_seconds < 5.0
            assert gateway.sync.counts.connected


async def test_heartbeats_reach_the_pod(valkey: EmbeddedValkey) -> None:
    async with pods(valkey, "pod-a") as (pod,):
        gateway = ReadingGateway(valkey.url)
        async with reading(gateway):
            seen = gateway.pods["pod-a"]
            await until(lambda: seen.report is not None)
            assert seen.report is not None
            assert seen.report.total_blocks == 48
            assert (seen.epoch, seen.model, seen.served_names) == (pod.publisher.epoch, "m", ("m",))
            pod.draining = True
            pod.publisher.poke()
            await until(lambda: seen.draining)


async def test_a_lost_batch_is_mended_by_the_next_snapshot(valkey: EmbeddedValkey) -> None:
    """Snapshots are so rare that none is written while the gateway does not read: it would hide the gap."""
    server = redis.Redis.from_url(valkey.url)
    rare = dataclasses.replace(FAST, snapshot_seconds=3.0)
    async with pods(valkey, "pod-a", timing=rare) as (pod,):
        gateway = ReadingGateway(valkey.url)
        async with reading(gateway):
            pod.store(1)
            await until(lambda: gateway.knows(pod))
            await gateway.sync.stop()
            pod.store(2)
            await until(lambda: pod.publisher.counts.batches == 2)
            server.xdel(KEYS.events, server.xrevrange(KEYS.events, count=1)[0][0])
            pod.store(3)
            await until(lambda: pod.publisher.counts.batches == 3)
            gateway.sync.start()
            await until(lambda: gateway.knows(pod))
            assert gateway.index.gaps == 1


async def test_the_loss_of_a_pods_last_batch_is_found_by_its_heartbeat(valkey: EmbeddedValkey) -> None:
    server = redis.Redis.from_url(valkey.url)
    async with pods(valkey, "pod-a") as (pod,):
        gateway = ReadingGateway(valkey.url)
        async with reading(gateway):
            pod.store(1)
            await until(lambda: gateway.knows(pod))
            await gateway.sync.stop()
            pod.store(2)
            await until(lambda: pod.publisher.counts.batches == 2)
            server.xtrim(KEYS.events, maxlen=0, approximate=False)
            gateway.sync.start()
            await until(lambda: gateway.knows(pod))


async def test_a_pod_restarted_under_its_name_holds_no_block_of_its_old_process(
    valkey: EmbeddedValkey,
) -> None:
    """P19. The old process is killed: it signs nothing off. Its heartbeat, snapshot and batches stay
    behind."""
    gateway = ReadingGateway(valkey.url)
    blocks = list(range(20))
    async with reading(gateway):
        old = PoolPod(valkey.url)
        assert await old.start()
        old.store(*blocks)
        await until(lambda: gateway.knows(old))
        assert old.publisher._task is not None
        old.publisher._task.cancel()
        async with pods(valkey, "pod-a") as (new,):
            # `start` has returned: from here on the pod may say that it is ready.
            await until(lambda: gateway.pods["pod-a"].epoch == new.publisher.epoch, seconds=2)
            chain = sorted(old.hashes())
            assert gateway.index.match(chain, time.monotonic()) == {}
            await until(lambda: gateway.knows(new))
            new.store(3)
            await until(lambda: gateway.knows(new))
            assert gateway.index._real.blocks("pod-a") == 1
        # The killed publisher's connection; nothing is signed off twice.
        old.publisher._task = None
        await old.stop()


async def test_a_late_gateway_ignores_batches_of_earlier_lives(valkey: EmbeddedValkey) -> None:
    for _ in range(2):
        async with pods(valkey, "pod-a") as (old,):
            old.work(100)
            await until(lambda old=old: not old.publisher._log.pending and not old.publisher._unsent)
    async with pods(valkey, "pod-a") as (pod,):
        gateway = ReadingGateway(valkey.url)
        async with reading(gateway):
            pod.store(1, 2)
            await until(lambda: gateway.knows(pod))


async def test_a_pod_that_leaves_is_forgotten(valkey: EmbeddedValkey) -> None:
    gateway = ReadingGateway(valkey.url, heartbeats=Heartbeats(missing_after=0.2))
    async with reading(gateway):
        async with pods(valkey, "pod-a") as (pod,):
            pod.store(1)
            await until(lambda: gateway.knows(pod))
        await until(lambda: not gateway.index._real.pods())


async def test_a_pod_that_falls_silent_is_forgotten_and_its_field_deleted(valkey: EmbeddedValkey) -> None:
    server = redis.Redis.from_url(valkey.url)
    gateway = ReadingGateway(valkey.url, heartbeats=Heartbeats(silent_after=0.5, forget_after=1.0))
    async with reading(gateway):
        pod = PoolPod(valkey.url)
        assert await pod.start()
        pod.store(1)
        await until(lambda: gateway.knows(pod))
        assert pod.publisher._task is not None
        pod.publisher._task.cancel()
        await until(lambda: not gateway.index._real.pods())
        await until(lambda: not server.hexists(KEYS.pods, "pod-a"))
        await pod.stop()


async def test_a_pod_discovered_late_is_known_at_its_next_heartbeat(valkey: EmbeddedValkey) -> None:
    async with pods(valkey, "pod-a", "pod-b") as engines:
        gateway = ReadingGateway(valkey.url, ["pod-a"])
        async with reading(gateway):
            for pod in engines:
                pod.work(50)
            await until(lambda: gateway.knows(engines[0]))
            assert set(gateway.index._real.pods()) == {"pod-a"}
            gateway.pods["pod-b"] = Pod("pod-b", "pod-b:8000")
            await until(lambda: gateway.knows(engines[1]))
            del gateway.pods["pod-b"]
            await until(lambda: set(gateway.index._real.pods()) == {"pod-a"})


async def test_garbage_in_redis_is_counted_and_passed_over(valkey: EmbeddedValkey) -> None:
    server = redis.Redis.from_url(valkey.url)
    async with pods(valkey, "pod-a") as (pod,):
        gateway = ReadingGateway(valkey.url, ["pod-a", "pod-b"])
        async with reading(gateway):
            server.xadd(KEYS.events, {"b": b"\xc1"})
            server.xadd(KEYS.events, {"other": b"field"})
            server.hset(KEYS.pods, "pod-c", b"not a report")
            bogus = LoadReport(
                pod="pod-b", address="pod-b:8000", epoch="e", time=time.time(), model="m", block_size=16
            )
            server.hset(KEYS.pods, "pod-b", encode_report(bogus))
            server.set(KEYS.snapshot("pod-b"), b"not a snapshot")
            await until(lambda: gateway.sync.counts.events["garbage"] == 2)
            await until(lambda: gateway.sync.counts.reloads["garbage"] >= 1)
            pod.store(1)
            await until(lambda: gateway.knows(pod))
            assert gateway.sync.counts.failures == 0


def test_a_report_finds_its_pod_by_name_or_by_address() -> None:
    known = {"a": Pod("a", "10.0.0.1:80"), "static-1": Pod("static-1", "10.0.0.2:80")}
    find = find_in(known)

    def report(pod: str, address: str) -> LoadReport:
        return LoadReport(pod=pod, address=address, epoch="e", time=0.0, model="m", block_size=16)

    assert find(report("a", "elsewhere:80")) is known["a"]
    assert find(report("host-1", "10.0.0.2:80")) is known["static-1"]
    assert find(report("host-1", "10.0.0.2:80")) is known["static-1"]
    assert find(report("host-1", "10.0.0.3:80")) is None
    del known["static-1"]
    assert find(report("host-1", "10.0.0.2:80")) is None


def test_hashes_of_the_test_pods_differ() -> None:
    assert len({block_hash(number)[:8] for number in range(1_000)}) == 1_000
