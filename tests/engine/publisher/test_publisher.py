"""What a publisher puts into a real Valkey, and how it fares when that is gone, slow or empty."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
from collections.abc import AsyncIterator

import pytest
import redis

from leadline.cli.valkey import EmbeddedValkey
from leadline.protocol.events import CacheSnapshot, EventBatch, decode_batch, decode_snapshot
from leadline.protocol.load import LoadReport, decode_report
from live_valkey import FAST, KEYS, PoolPod, pods, until

SNAPSHOT = KEYS.snapshot("pod-a")


class Inside:
    """A synchronous look into the server."""

    def __init__(self, valkey: EmbeddedValkey) -> None:
        self.redis = redis.Redis.from_url(valkey.url, socket_timeout=5)

    def batches(self) -> list[EventBatch]:
        return [decode_batch(fields[b"b"]) for _, fields in self.redis.xrange(KEYS.events)]

    def snapshot(self) -> CacheSnapshot | None:
        data = self.redis.get(SNAPSHOT)
        return None if data is None else decode_snapshot(data)

    def snapshot_is(self, pod: PoolPod) -> bool:
        snapshot = self.snapshot()
        return (
            snapshot is not None
            and snapshot.epoch == pod.publisher.epoch
            and set(snapshot.hashes()) == pod.hashes()
        )

    def report(self) -> LoadReport | None:
        data = self.redis.hget(KEYS.pods, "pod-a")
        return None if data is None else decode_report(data)

    def rebuilt(self) -> set[int]:
        """The pod's cache by the stream alone."""
        state: set[int] = set()
        for batch in self.batches():
            state = set() if batch.cleared else state
            state = (state - set(batch.removed)) | set(batch.stored)
        return state


@pytest.fixture
def inside(valkey: EmbeddedValkey) -> Inside:
    return Inside(valkey)


@pytest.fixture
async def pod(valkey: EmbeddedValkey) -> AsyncIterator[PoolPod]:
    async with pods(valkey, "pod-a") as made:
        yield made[0]


async def test_batches_carry_the_epoch_and_count_by_one(pod: PoolPod, inside: Inside) -> None:
    for _ in range(20):
        pod.work(10)
        await until(lambda: inside.rebuilt() == pod.hashes())
    batches = inside.batches()
    assert {batch.epoch for batch in batches} == {pod.publisher.epoch}
    assert [batch.seq for batch in batches] == list(range(len(batches)))


async def test_changes_within_the_batch_time_share_a_batch(valkey: EmbeddedValkey, inside: Inside) -> None:
    slow = PoolPod(valkey.url, timing=dataclasses.replace(FAST, batch_seconds=0.3))
    await slow.start()
    try:
        for number in range(40):
            slow.store(number)
        await until(lambda: inside.rebuilt() == slow.hashes())
        assert len(inside.batches()) <= 2
    finally:
        await slow.stop()


async def test_the_snapshot_follows_the_cache_and_names_its_batch(pod: PoolPod, inside: Inside) -> None:
    pod.work(50)
    await until(lambda: inside.snapshot_is(pod))
    snapshot = inside.snapshot()
    assert snapshot is not None
    last = inside.redis.xrevrange(KEYS.events, count=1)[0][0].decode()
    assert snapshot.seq == inside.batches()[-1].seq
    assert snapshot.stream_id == last
    assert 0 < inside.redis.pttl(SNAPSHOT) <= FAST.snapshot_ttl * 1000


async def test_an_idle_pod_renews_its_snapshot_and_does_not_rewrite_it(pod: PoolPod, inside: Inside) -> None:
    pod.store(1, 2)
    await until(lambda: inside.snapshot_is(pod))
    beats = pod.publisher.counts.heartbeats
    await until(lambda: pod.publisher.counts.heartbeats > beats)  # what is in Redis is counted as well
    written = pod.publisher.counts.snapshots
    inside.redis.pexpire(SNAPSHOT, 5_000)
    await until(lambda: inside.redis.pttl(SNAPSHOT) > 5_000)
    assert pod.publisher.counts.snapshots == written


async def test_a_snapshot_that_was_evicted_is_written_again(pod: PoolPod, inside: Inside) -> None:
    pod.store(1, 2, 3)
    await until(lambda: inside.snapshot_is(pod))
    inside.redis.delete(SNAPSHOT)
    await until(lambda: inside.snapshot_is(pod))


async def test_whoever_sees_the_pod_finds_its_snapshot(valkey: EmbeddedValkey, inside: Inside) -> None:
    async with pods(valkey, "pod-a") as (pod,):
        await until(inside.report)
        assert inside.snapshot_is(pod)


async def test_the_heartbeat_tells_load_and_last_batch(pod: PoolPod, inside: Inside) -> None:
    pod.store(*range(5))

    def tells() -> bool:
        report = inside.report()
        return report is not None and report.cache_seq == inside.batches()[-1].seq >= 0

    await until(lambda: inside.batches())
    await until(tells)
    report = inside.report()
    assert report is not None
    assert (report.pod, report.address, report.epoch) == ("pod-a", "pod-a:8000", pod.publisher.epoch)
    assert (report.total_blocks, report.free_blocks) == (48, 48)
    assert report.prefill_tokens_per_second == 1000.0
    assert not report.draining


async def test_draining_is_told_at_once(valkey: EmbeddedValkey, inside: Inside) -> None:
    pod = PoolPod(valkey.url, timing=dataclasses.replace(FAST, heartbeat_seconds=3600.0))
    await pod.start()
    try:
        pod.draining = True
        pod.publisher.poke()
        await until(lambda: (report := inside.report()) is not None and report.draining)
    finally:
        await pod.stop()


async def test_the_stream_is_capped(valkey: EmbeddedValkey, inside: Inside) -> None:
    pod = PoolPod(valkey.url, timing=dataclasses.replace(FAST, batch_seconds=0.0, stream_length=10))
    await pod.start()
    try:
        for number in range(300):
            pod.store(number)
            await until(lambda number=number: pod.publisher.counts.batches > number)
        # The cap is approximate: whole nodes of the stream go, 100 entries each by default.
        assert inside.redis.xlen(KEYS.events) <= 210
    finally:
        await pod.stop()


async def test_a_pod_that_leaves_takes_itself_off_the_list(valkey: EmbeddedValkey, inside: Inside) -> None:
    async with pods(valkey, "pod-a") as (pod,):
        pod.store(1)
        await until(lambda: inside.snapshot_is(pod))
    assert inside.report() is None
    assert inside.snapshot() is None


async def test_an_old_life_that_leaves_late_spares_the_new_one(
    valkey: EmbeddedValkey, inside: Inside
) -> None:
    old = PoolPod(valkey.url, timing=dataclasses.replace(FAST, heartbeat_seconds=3600.0))
    assert await old.start()
    async with pods(valkey, "pod-a") as (new,):
        await old.stop()
        report = inside.report()
        assert report is not None
        assert report.epoch == new.publisher.epoch
        assert inside.snapshot_is(new)


# Failures of Redis (P15)


async def test_redis_may_come_later(valkey: EmbeddedValkey, inside: Inside) -> None:
    valkey.kill()
    pod = PoolPod(valkey.url)
    try:
        assert not await pod.start(patience=0.3)
        pod.work(100)
        await until(lambda: pod.publisher.counts.failures >= 2)
        valkey.restart()
        await until(lambda: inside.snapshot_is(pod))
        await until(lambda: inside.rebuilt() == pod.hashes())
        await until(lambda: pod.publisher.counts.connected)
    finally:
        await pod.stop()


async def test_redis_may_die_and_come_back_empty(
    pod: PoolPod, valkey: EmbeddedValkey, inside: Inside
) -> None:
    pod.work(100)
    await until(lambda: inside.snapshot_is(pod))
    valkey.kill()
    pod.work(100)
    await until(lambda: not pod.publisher.counts.connected)
    valkey.restart()
    await until(lambda: inside.snapshot_is(pod))
    await until(inside.report)
    pod.work(20)
    await until(lambda: inside.snapshot_is(pod))


async def test_redis_may_be_flushed(pod: PoolPod, inside: Inside) -> None:
    pod.work(100)
    await until(lambda: inside.snapshot_is(pod))
    inside.redis.flushall()
    await until(lambda: inside.snapshot_is(pod))
    await until(inside.report)


async def test_redis_may_hang(pod: PoolPod, valkey: EmbeddedValkey, inside: Inside) -> None:
    pod.work(50)
    await until(lambda: inside.snapshot_is(pod))
    server = valkey.pid
    os.kill(server, signal.SIGSTOP)
    try:
        pod.work(50)
        failures = pod.publisher.counts.failures
        await until(lambda: pod.publisher.counts.failures >= failures + 2)
    finally:
        os.kill(server, signal.SIGCONT)
    await until(lambda: inside.snapshot_is(pod))
    # What was cut before the server hung may stand there twice, under one number.
    batches = inside.batches()
    assert {batch.seq for batch in batches} == set(range(batches[-1].seq + 1))
    once = {batch.seq: batch for batch in batches}
    assert all(once[batch.seq] == batch for batch in batches)


async def test_after_trouble_the_snapshot_is_rewritten(
    pod: PoolPod, valkey: EmbeddedValkey, inside: Inside
) -> None:
    """The server that answers now may be a replica that was behind, with an older snapshot than we wrote."""
    pod.work(50)
    await until(lambda: inside.snapshot_is(pod) and pod.publisher.counts.connected)
    written = pod.publisher.counts.snapshots
    os.kill(valkey.pid, signal.SIGSTOP)
    try:
        await until(lambda: not pod.publisher.counts.connected)
    finally:
        os.kill(valkey.pid, signal.SIGCONT)
    await until(lambda: pod.publisher.counts.snapshots > written)


async def test_a_long_outage_leaves_one_net_change_behind(pod: PoolPod, valkey: EmbeddedValkey) -> None:
    pod.work(20)
    await until(lambda: pod.publisher.counts.connected and not pod.publisher._log.pending)
    valkey.kill()
    for _ in range(8):
        failures = pod.publisher.counts.failures
        pod.work(300, universe=1_000_000)
        await until(lambda failures=failures: pod.publisher.counts.failures > failures)
    # What was cut when the outage began, and the net change since.
    assert len(pod.publisher._unsent) <= 1
    assert pod.publisher._log.pending <= 2 * pod.pool.num_blocks + 1
    valkey.restart()
    await until(lambda: pod.publisher.counts.connected)


async def test_stopping_does_not_wait_for_an_absent_redis(pod: PoolPod, valkey: EmbeddedValkey) -> None:
    valkey.kill()
    await until(lambda: not pod.publisher.counts.connected)
    await pod.publisher.stop(patience=0.2)
    valkey.restart()


async def test_the_log_names_the_trouble_once_and_never_the_password(
    valkey: EmbeddedValkey, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = valkey.url.replace("unix://:", "unix://:hunter2")
    pod = PoolPod(wrong)
    try:
        assert not await pod.start(patience=0.3)
        await until(lambda: pod.publisher.counts.failures >= 3)
    finally:
        await pod.stop()
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "serving on" in warnings[0].getMessage()
    password = valkey.url.split("@")[0].removeprefix("unix://:")
    assert "hunter2" not in caplog.text
    assert password not in caplog.text
