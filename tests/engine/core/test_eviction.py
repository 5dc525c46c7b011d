"""Eviction policies on their own."""

from __future__ import annotations

import pytest

from leadline.engine.core import EvictionPolicy, LengthAwareEviction, LRUEviction


def drain(policy: EvictionPolicy) -> list[int]:
    return [policy.pop() for _ in range(len(policy))]


@pytest.mark.parametrize("policy", [LRUEviction(), LengthAwareEviction()])
def test_the_deepest_block_of_a_chain_goes_first(policy: EvictionPolicy) -> None:
    for block in (3, 2, 1, 0):
        policy.add(block, 4)
    assert drain(policy) == [3, 2, 1, 0]


@pytest.mark.parametrize("policy", [LRUEviction(), LengthAwareEviction()])
def test_a_block_used_again_counts_as_new(policy: EvictionPolicy) -> None:
    for block in (0, 1, 2):
        policy.add(block, 1)
    policy.remove(0)
    policy.add(0, 1)
    assert drain(policy) == [1, 2, 0]


@pytest.mark.parametrize("policy", [LRUEviction(), LengthAwareEviction()])
def test_clearing_forgets_all_blocks(policy: EvictionPolicy) -> None:
    policy.add(1, 1)
    policy.clear()
    assert len(policy) == 0
    policy.add(1, 1)
    assert drain(policy) == [1]


def test_lru_does_not_look_at_length() -> None:
    policy = LRUEviction()
    policy.add(0, 1000)
    policy.add(1, 1)
    assert drain(policy) == [0, 1]


def test_length_aware_keeps_a_long_chain_over_newer_short_ones_but_not_for_ever() -> None:
    policy = LengthAwareEviction()
    for block in range(15, -1, -1):
        policy.add(block, 16)
    for block in range(100, 110):
        policy.add(block, 1)
    assert [policy.pop() for _ in range(10)] == list(range(100, 110))
    for block in range(200, 300):
        policy.add(block, 1)
    order = drain(policy)
    assert order.index(15) < order.index(299)


def test_length_aware_with_weight_zero_is_lru() -> None:
    policy = LengthAwareEviction(weight=0.0)
    for block, length in ((0, 64), (1, 1), (2, 9)):
        policy.add(block, length)
    assert drain(policy) == [0, 1, 2]
