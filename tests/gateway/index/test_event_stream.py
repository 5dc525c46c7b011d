"""The stream machine: batches that are lost, repeated or out of order."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.gateway.index.prefix_index import PrefixIndex
from leadline.gateway.index.stream import EventStream, Outcome
from leadline.protocol.events import CacheSnapshot, EventBatch

BLOCKS = range(12)


class Engine:
    """A pod's cache, which publishes each change as the next batch."""

    def __init__(self, epoch: str, rng: random.Random) -> None:
        self.epoch, self.rng = epoch, rng
        self.held: set[int] = set()
        self.seq = -1

    def step(self) -> EventBatch:
        cleared = self.rng.random() < 0.1
        before = set() if cleared else self.held
        removed = {block for block in before if self.rng.random() < 0.2}
        stored = {block for block in BLOCKS if block not in before and self.rng.random() < 0.3}
        self.held = (before - removed) | stored
        self.seq += 1
        return EventBatch(
            epoch=self.epoch, seq=self.seq, stored=sorted(stored), removed=sorted(removed), cleared=cleared
        )

    def snapshot(self) -> CacheSnapshot:
        return CacheSnapshot(epoch=self.epoch, seq=self.seq, packed=CacheSnapshot.pack(self.held))


def held_by(index: PrefixIndex, pod: str) -> set[int]:
    return {block for block in BLOCKS if pod in index.match([block])}


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(seed=1)


def test_a_fresh_pod_needs_no_snapshot_if_its_first_batch_is_seen(index: PrefixIndex) -> None:
    stream = EventStream(index)
    assert stream.pod_seen("a", "e1")
    assert stream.reloads() == ["a"]
    assert stream.batch(EventBatch(epoch="e1", seq=0, stored=[1, 2])) is Outcome.APPLIED
    assert stream.reloads() == []
    assert held_by(index, "a") == {1, 2}


def test_stored_after_removed_after_cleared(index: PrefixIndex) -> None:
    stream = EventStream(index)
    stream.pod_seen("a", "e1")
    stream.batch(EventBatch(epoch="e1", seq=0, stored=[1, 2]))
    stream.batch(EventBatch(epoch="e1", seq=1, removed=[1], stored=[3]))
    assert held_by(index, "a") == {2, 3}
    stream.batch(EventBatch(epoch="e1", seq=2, cleared=True, stored=[4]))
    assert held_by(index, "a") == {4}


def test_a_gap_asks_for_the_snapshot_and_later_batches_are_kept(index: PrefixIndex) -> None:
    stream = EventStream(index)
    stream.pod_seen("a", "e1")
    stream.batch(EventBatch(epoch="e1", seq=0, stored=[1]))
    assert stream.batch(EventBatch(epoch="e1", seq=2, stored=[3])) is Outcome.GAP
    assert stream.reloads() == ["a"]
    assert stream.gaps == 1
    assert held_by(index, "a") == {1}
    snapshot = CacheSnapshot(epoch="e1", seq=1, packed=CacheSnapshot.pack([1, 2]))
    assert stream.snapshot("a", snapshot) is Outcome.APPLIED
    assert held_by(index, "a") == {1, 2, 3}
    assert stream.in_step("a")


def test_a_snapshot_from_before_the_gap_does_not_turn_time_back(index: PrefixIndex) -> None:
    stream = EventStream(index)
    stream.pod_seen("a", "e1")
    for seq in range(5):
        stream.batch(EventBatch(epoch="e1", seq=seq, stored=[seq]))
    stream.batch(EventBatch(epoch="e1", seq=7, stored=[7]))
    old = CacheSnapshot(epoch="e1", seq=2, packed=CacheSnapshot.pack([0, 1, 2]))
    assert stream.snapshot("a", old) is Outcome.STALE
    assert held_by(index, "a") == {0, 1, 2, 3, 4}
    assert stream.reloads() == ["a"]


def test_the_missing_batch_heals_the_gap_without_a_snapshot(index: PrefixIndex) -> None:
    stream = EventStream(index)
    stream.pod_seen("a", "e1")
    assert stream.batch(EventBatch(epoch="e1", seq=1, removed=[1])) is Outcome.GAP
    assert stream.batch(EventBatch(epoch="e1", seq=0, stored=[1, 2])) is Outcome.APPLIED
    assert held_by(index, "a") == {2}
    assert stream.reloads() == []


def test_a_cleared_batch_needs_nothing_before_it(index: PrefixIndex) -> None:
    stream = EventStream(index)
    stream.pod_seen("a", "e1")
    stream.batch(EventBatch(epoch="e1", seq=3, stored=[3]))
    assert stream.batch(EventBatch(epoch="e1", seq=9, cleared=True, stored=[5])) is Outcome.APPLIED
    assert held_by(index, "a") == {5}
    assert stream.in_step("a")


def test_batches_and_snapshots_of_another_epoch_are_ignored(index: PrefixIndex) -> None:  # P19
    stream = EventStream(index)
    stream.pod_seen("a", "e1")
    stream.batch(EventBatch(epoch="e1", seq=0, stored=[1]))
    assert stream.pod_seen("a", "e2")
    assert held_by(index, "a") == set()
    assert stream.batch(EventBatch(epoch="e1", seq=1, stored=[2])) is Outcome.UNKNOWN_EPOCH
    old = CacheSnapshot(epoch="e1", seq=5, packed=CacheSnapshot.pack([1, 2]))
    assert stream.snapshot("a", old) is Outcome.UNKNOWN_EPOCH
    assert held_by(index, "a") == set()


def test_a_pod_that_restarts_while_its_snapshot_loads_holds_nothing(index: PrefixIndex) -> None:
    stream = EventStream(index)
    stream.pod_seen("a", "e1")
    steps = stream.load_snapshot("a", CacheSnapshot(epoch="e1", seq=3, packed=CacheSnapshot.pack([1, 2])))
    next(steps)
    stream.pod_seen("a", "e2")
    assert list(steps) == []
    assert index.pods() == {"a": "e2"}
    assert held_by(index, "a") == set()


def test_batches_that_arrive_while_a_snapshot_loads_come_on_top_of_it(index: PrefixIndex) -> None:
    stream = EventStream(index)
    stream.pod_seen("a", "e1")
    steps = stream.load_snapshot("a", CacheSnapshot(epoch="e1", seq=3, packed=CacheSnapshot.pack([1, 2])))
    next(steps)
    assert stream.reloads() == []
    assert stream.batch(EventBatch(epoch="e1", seq=4, removed=[1])) is Outcome.GAP
    list(steps)
    assert held_by(index, "a") == {2}
    assert stream.in_step("a")


def test_a_load_that_is_given_up_asks_again(index: PrefixIndex) -> None:
    stream = EventStream(index)
    stream.pod_seen("a", "e1")
    steps = stream.load_snapshot("a", CacheSnapshot(epoch="e1", seq=3, packed=CacheSnapshot.pack([1, 2])))
    next(steps)
    steps.close()
    assert held_by(index, "a") == set()
    assert stream.reloads() == ["a"]


def test_losing_the_stream_asks_for_every_snapshot(index: PrefixIndex) -> None:
    stream = EventStream(index)
    for pod in ("a", "b"):
        stream.pod_seen(pod, f"epoch of {pod}")
        stream.batch(EventBatch(epoch=f"epoch of {pod}", seq=0, stored=[1]))
    stream.distrust()
    assert stream.reloads() == ["a", "b"]
    stream.pod_gone("b")
    assert stream.reloads() == ["a"]
    assert held_by(index, "b") == set()


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 60))
def test_lost_repeated_and_reordered_batches_converge_after_a_reload(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    index = PrefixIndex(seed=1)
    stream = EventStream(index)
    engines = {pod: Engine(f"{pod} life 0", rng) for pod in ("a", "b", "c")}
    for pod, engine in engines.items():
        stream.pod_seen(pod, engine.epoch)
    truth = {(pod, -1): set[int]() for pod in engines}
    wire: list[EventBatch] = []
    for step in range(steps):
        pod = rng.choice(list(engines))
        if rng.random() < 0.03:
            engines[pod] = Engine(f"{pod} life {step + 1}", rng)
            stream.pod_seen(pod, engines[pod].epoch)
            assert held_by(index, pod) == set()
        fate = rng.random()
        batch = engines[pod].step()
        truth[engines[pod].epoch, batch.seq] = set(engines[pod].held)
        if fate < 0.75:
            wire.append(batch)
        if fate < 0.1:
            wire.insert(rng.randrange(len(wire) + 1), batch)  # repeated, and perhaps too early
        while wire and rng.random() < 0.7:
            delivered = wire.pop(0)
            if stream.batch(delivered) is Outcome.APPLIED:
                owner = delivered.epoch.split()[0]
                if owner in engines and engines[owner].epoch == delivered.epoch and stream.in_step(owner):
                    position = stream._by_pod[owner].seq
                    assert held_by(index, owner) == truth[delivered.epoch, position]
        if rng.random() < 0.1:
            for lost in stream.reloads():
                stream.snapshot(lost, engines[lost].snapshot())
    for batch in wire:
        stream.batch(batch)
    stream.distrust()
    for pod in stream.reloads():
        assert stream.snapshot(pod, engines[pod].snapshot()) is Outcome.APPLIED
    for pod, engine in engines.items():
        assert held_by(index, pod) == engine.held
        assert stream.in_step(pod)
