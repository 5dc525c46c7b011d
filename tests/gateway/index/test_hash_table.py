"""The batched hash table under the prefix index against a plain dict."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.gateway.index.table import SEGMENT_SLOTS, HashTable


def check_equal(table: HashTable, model: dict[int, int], others: np.ndarray) -> None:
    assert len(table) == len(model)
    keys = np.array(list(model), dtype=np.uint64)
    slots = table.find(keys)
    assert (slots >= 0).all()
    assert np.unique(slots).size == keys.size
    assert table.get(slots).tolist() == list(model.values())
    absent = np.array([key for key in others.tolist() if key not in model], dtype=np.uint64)
    assert (table.find(absent) == -1).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(1, 6_000), min_size=1, max_size=8))
def test_the_table_equals_a_dict_while_it_splits_and_empties(seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    table, model = HashTable(seed), dict[int, int]()
    for size in sizes:
        fresh = np.unique(rng.integers(0, 2**64, size, dtype=np.uint64))
        values = rng.integers(1, 2**32, fresh.size, dtype=np.uint32)
        table.insert(fresh, values)
        model.update(zip(fresh.tolist(), values.tolist(), strict=True))
        known = np.array(list(model), dtype=np.uint64)
        gone = rng.choice(known, known.size // 3, replace=False)
        table.delete(table.find(gone))
        for key in gone.tolist():
            del model[key]
        check_equal(table, model, np.concatenate((gone, rng.integers(0, 2**64, 100, dtype=np.uint64))))


@given(keys=st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=60), seed=st.integers(0, 2**64 - 1))
def test_any_keys_can_be_stored_and_found_again(keys: list[int], seed: int) -> None:
    table = HashTable(seed)
    array = np.array(keys, dtype=np.uint64)
    table.insert(array, np.arange(1, len(keys) + 1, dtype=np.uint32))
    assert table.get(table.find(array)).tolist() == list(range(1, len(keys) + 1))


def test_consecutive_numbers_fill_the_table_as_well_as_random_ones() -> None:
    table = HashTable(7)
    table.insert(np.arange(200_000, dtype=np.uint64), np.ones(200_000, dtype=np.uint32))
    assert len(table) == 200_000
    assert table.slots < 200_000 / 0.35


def test_a_million_keys_take_at_most_31_bytes_each_at_every_size() -> None:
    rng = np.random.default_rng(3)
    table = HashTable(3)
    worst = 0.0
    while len(table) < 1_000_000:
        fresh = rng.integers(0, 2**64, 20_000, dtype=np.uint64)
        table.insert(fresh, np.ones(fresh.size, dtype=np.uint32))
        if len(table) > 20 * SEGMENT_SLOTS:
            worst = max(worst, table.slots * 12 / len(table))
    assert worst < 31


def test_lookups_of_nothing_and_of_duplicates_work() -> None:
    table = HashTable(1)
    assert table.find(np.empty(0, dtype=np.uint64)).tolist() == []
    table.insert(np.array([5], dtype=np.uint64), np.array([9], dtype=np.uint32))
    slots = table.find(np.array([5, 6, 5], dtype=np.uint64))
    assert slots[0] == slots[2] >= 0
    assert slots[1] == -1
