"""Changes of the pool become batches and snapshots from which its content can be rebuilt."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.engine.core.block_pool import BlockPool
from leadline.engine.publisher import log as log_module
from leadline.engine.publisher.log import CacheChanges, CacheLog
from leadline.engine.wire import CacheChange, decode_from_core, encode
from leadline.protocol.chain import short
from leadline.protocol.events import EventBatch


def packed(*names: int) -> bytes:
    return array("Q", names).tobytes()


def replay(state: set[int], batches: list[EventBatch]) -> set[int]:
    for batch in batches:
        state = set() if batch.cleared else state
        state = (state - set(batch.removed)) | set(batch.stored)
    return state


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 30)),
        st.tuples(st.just("reset"), st.just(0)),
        st.tuples(st.just("take"), st.just(0)),
        st.tuples(st.just("cut"), st.just(0)),
    ),
    max_size=120,
)


@settings(max_examples=200, deadline=None)
@given(OPERATIONS, st.integers(1, 12))
def test_whenever_changes_are_taken_and_cut_a_reader_rebuilds_the_pool(
    operations: list[tuple[str, int]], blocks: int
) -> None:
    changes = CacheChanges()
    pool = BlockPool(blocks, listener=changes)
    log = CacheLog("e")
    read: set[int] = set()
    numbers: list[int] = []

    def take() -> None:
        change = changes.take()
        if change is not None:
            assert decode_from_core(encode(change)) == change
            log.apply(change)
            assert log.pending <= 2 * blocks + 1

    def cut() -> None:
        nonlocal read
        batches = log.cut()
        numbers.extend(batch.seq for batch in batches)
        read = replay(read, batches)
        assert read == log.held == set(log.snapshot("0-0").hashes())

    for kind, number in operations:
        match kind:
            case "store":
                name = random.Random(number).randbytes(16)
                if not pool.match([name], 1):
                    table = pool.allocate(1)
                    pool.commit(table[0], name)
                    pool.release(table)
            case "reset":
                pool.reset()
            case "take":
                take()
            case "cut":
                cut()
    take()
    cut()
    assert read == {short(name) for name in pool.hashes()}
    assert numbers == list(range(len(numbers)))


def test_a_block_that_came_and_went_between_two_messages_is_not_mentioned() -> None:
    changes = CacheChanges()
    changes.stored(b"a" * 16)
    changes.removed(b"a" * 16)
    assert changes.take() is None


def test_a_block_that_went_and_came_back_is_not_mentioned() -> None:
    log = CacheLog("e")
    log.apply(CacheChange(stored=packed(1, 2)))
    log.cut()
    log.apply(CacheChange(removed=packed(1)))
    log.apply(CacheChange(stored=packed(1)))
    assert log.cut() == []
    assert log.held == {1, 2}


def test_nothing_new_is_no_batch() -> None:
    log = CacheLog("e")
    assert log.cut() == []
    assert log.seq == -1


def test_a_long_backlog_is_cut_into_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "MAX_BATCH_HASHES", 10)
    log = CacheLog("e")
    log.apply(CacheChange(stored=packed(*range(25))))
    first = log.cut()
    log.apply(CacheChange(removed=packed(*range(25)), stored=packed(*range(100, 107))))
    log.apply(CacheChange(cleared=True, stored=packed(*range(200, 215))))
    second = log.cut()
    for batches in (first, second):
        assert all(len(batch.stored) + len(batch.removed) <= 10 for batch in batches)
    assert [batch.seq for batch in first + second] == list(range(len(first) + len(second)))
    assert [batch.cleared for batch in second] == [True, False]
    assert replay(set(), first + second) == set(range(200, 215))


def test_a_snapshot_is_refused_while_events_are_pending() -> None:
    log = CacheLog("e")
    log.apply(CacheChange(stored=packed(1)))
    with pytest.raises(RuntimeError, match="1 events are pending"):
        log.snapshot("0-0")
