"""Block pool: states of a block, the prefix index, its listener."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.engine.core import BlockPool, IntegrityError, LengthAwareEviction, LRUEviction
from leadline.engine.errors import ConfigError


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, bytes]] = []

    def stored(self, block_hash: bytes) -> None:
        self.events.append(("stored", block_hash))

    def removed(self, block_hash: bytes) -> None:
        self.events.append(("removed", block_hash))

    def cleared(self) -> None:
        self.events.append(("cleared", b""))


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_used, pool.num_cached


def test_a_released_block_without_hash_is_free_and_one_with_hash_stays_cached() -> None:
    pool = BlockPool(4)
    table = pool.allocate(2)
    pool.commit(table[0], b"a")
    assert counts(pool) == (2, 2, 0)
    pool.release(table)
    assert counts(pool) == (3, 0, 1)
    assert pool.match([b"a", b"b"], 2) == [table[0]]
    pool.check_integrity([])


def test_a_hit_keeps_a_block_from_being_evicted() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.commit(table[0], b"a")
    pool.release(table)
    pool.acquire(table)
    assert pool.num_available == 1
    pool.allocate_one()
    with pytest.raises(IntegrityError, match="no block is available"):
        pool.allocate_one()


def test_free_blocks_are_used_before_cached_ones_are_evicted() -> None:
    pool = BlockPool(3, listener=(heard := Recorder()))
    table = pool.allocate(1)
    pool.commit(table[0], b"a")
    pool.release(table)
    pool.allocate(2)
    assert pool.contains(b"a")
    assert pool.allocate_one() == table[0]
    assert not pool.contains(b"a")
    assert heard.events == [("stored", b"a"), ("removed", b"a")]


def test_a_second_block_with_a_cached_hash_stays_private_and_is_freed() -> None:
    pool = BlockPool(4, listener=(heard := Recorder()))
    first, second = pool.allocate(1), pool.allocate(1)
    assert pool.commit(first[0], b"a")
    assert not pool.commit(second[0], b"a")
    pool.release(second)
    assert pool.match([b"a"], 1) == first
    assert counts(pool) == (3, 1, 0)
    assert heard.events == [("stored", b"a")]
    pool.check_integrity([first])


def test_a_private_block_takes_the_place_of_an_evicted_twin() -> None:
    pool = BlockPool(2, listener=(heard := Recorder()))
    first, second = pool.allocate(1), pool.allocate(1)
    pool.commit(first[0], b"a")
    pool.commit(second[0], b"a")
    pool.release(first)
    other = pool.allocate(1)  # evicts the indexed block
    pool.release(second)
    assert pool.match([b"a"], 1) == second
    assert heard.events == [("stored", b"a"), ("removed", b"a"), ("stored", b"a")]
    pool.check_integrity([other])


def test_a_twin_that_stands_in_for_a_parent_outlives_the_children() -> None:
    pool = BlockPool(4)
    old, table = pool.allocate(1), pool.allocate(2)
    pool.commit(old[0], b"parent")
    pool.release(old)
    pool.commit(table[0], b"parent")  # private: `old` holds that hash
    pool.commit(table[1], b"child")
    pool.release(table)
    pool.allocate(pool.num_free + 1)
    assert pool.contains(b"parent")
    assert not pool.contains(b"child")


def test_the_pool_tells_the_policy_how_long_a_chain_is() -> None:
    pool = BlockPool(12, LengthAwareEviction())
    for name, length in (("long", 8), ("short", 2)):
        table = pool.allocate(length)
        for i, block in enumerate(table):
            pool.commit(block, f"{name}{i}".encode())
        pool.release(table)
    pool.allocate(4)
    assert pool.num_cached == 8
    assert pool.contains(b"long7")
    assert not pool.contains(b"short0")


def test_a_twin_in_use_learns_how_long_the_chain_is_that_hangs_on_it() -> None:
    pool = BlockPool(12, LengthAwareEviction())
    short, table = pool.allocate(1), pool.allocate(9)
    pool.commit(short[0], b"0")
    for i, block in enumerate(table):
        pool.commit(block, str(i).encode())  # block 0 stays private: `short` holds that hash
    pool.release(table)
    pool.release(short)
    pool.allocate(pool.num_free + 8)
    assert pool.hashes() == [b"0"]


def test_reset_forgets_hashes_but_leaves_blocks_in_use_alone() -> None:
    pool = BlockPool(4, listener=(heard := Recorder()))
    kept, gone = pool.allocate(1), pool.allocate(1)
    pool.commit(kept[0], b"a")
    pool.commit(gone[0], b"b")
    pool.release(gone)
    assert pool.reset() == 2
    assert counts(pool) == (3, 1, 0)
    assert pool.match([b"a"], 1) == []
    pool.check_integrity([kept])
    pool.release(kept)
    assert counts(pool) == (4, 0, 0)
    assert heard.events[-1] == ("cleared", b"")


def test_a_block_released_too_often_is_reported() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(IntegrityError, match="no reference"):
        pool.release(table)


def test_wrong_references_are_found() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    with pytest.raises(IntegrityError, match="differ from the block tables"):
        pool.check_integrity([table, table])


def test_a_policy_that_evicts_a_block_in_use_is_named() -> None:
    class Wrong(LRUEviction):
        def pop(self) -> int:
            super().pop()
            return 0

    pool = BlockPool(2, Wrong())
    pool.commit(pool.allocate_one(), b"a")  # block 0, in use
    other = pool.allocate(1)
    pool.commit(other[0], b"b")
    pool.release(other)
    with pytest.raises(IntegrityError, match="Wrong chose block 0"):
        pool.allocate_one()


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_kv_blocks"):
        BlockPool(0)


@given(st.data(), st.sampled_from([LRUEviction, LengthAwareEviction]), st.integers(1, 12))
def test_any_use_of_tables_keeps_the_counts_and_never_loses_a_parent_before_its_child(
    data: st.DataObject, eviction: type, size: int
) -> None:
    """Tables over a small tree of prefixes, as the scheduler builds them: hits, new blocks, commits."""
    heard = Recorder()
    pool = BlockPool(size, eviction(), heard)
    tables: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        if tables and data.draw(st.booleans()):
            pool.release(tables.pop(data.draw(st.integers(0, len(tables) - 1))))
        else:
            path = data.draw(st.lists(st.sampled_from([b"x", b"y"]), min_size=1, max_size=5))
            hashes = [b"".join(path[: i + 1]) for i in range(len(path))]
            hits = pool.match(hashes, len(hashes))
            missing = len(hashes) - len(hits)
            if missing + pool.num_unreferenced(hits) > pool.num_available:
                continue
            pool.acquire(hits)
            table = hits + pool.allocate(missing)
            for block, block_hash in list(zip(table, hashes, strict=True))[len(hits) :]:
                pool.commit(block, block_hash)
            tables.append(table)
        pool.check_integrity(tables)
        indexed = set(pool.hashes())
        held: set[bytes] = set()
        for kind, block_hash in heard.events:
            (held.add if kind == "stored" else held.remove)(block_hash)
        assert held == indexed
        for block_hash in indexed:
            block = pool.match([block_hash], 1)
            if pool.num_unreferenced(block) and len(block_hash) > 1:
                assert block_hash[:-1] in indexed, "a cached block lost its parent"
