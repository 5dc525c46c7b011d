"""The prefix index against a dict of sets, under random operations."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from leadline.gateway.index.prefix_index import PrefixIndex

PODS = [f"pod-{number}" for number in range(6)]
BLOCKS = 24


def naive_match(held: dict[str, set[int]], chain: list[int]) -> dict[str, int]:
    depths = {}
    for pod, blocks in held.items():
        depth = 0
        while depth < len(chain) and chain[depth] in blocks:
            depth += 1
        if depth:
            depths[pod] = depth
    return depths


pods = st.sampled_from(PODS)
epochs = st.sampled_from(["e1", "e2"])
block_lists = st.lists(st.integers(0, BLOCKS - 1), max_size=BLOCKS)


class IndexMachine(RuleBasedStateMachine):
    """Blocks are 0…23, scrambled into 64 bits, so that pods share them all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(seed=1)
        self.held: dict[str, set[int]] = {}
        self.epochs: dict[str, str] = {}

    def hashes(self, blocks: list[int]) -> list[int]:
        return [(block * 0x9E3779B97F4A7C15 + 1) % 2**64 for block in blocks]

    @rule(pod=pods, epoch=epochs, blocks=block_lists)
    def replace(self, pod: str, epoch: str, blocks: list[int]) -> None:
        self.index.replace_pod(pod, epoch, self.hashes(blocks))
        self.held[pod], self.epochs[pod] = set(blocks), epoch

    @rule(pod=pods, epoch=epochs, blocks=block_lists, steps=st.integers(0, 30), chunk=st.integers(1, 5))
    def load_in_steps(self, pod: str, epoch: str, blocks: list[int], steps: int, chunk: int) -> None:
        loading = self.index.load_pod(pod, epoch, self.hashes(blocks), chunk)
        for _ in range(steps):
            if next(loading, self) is self:
                self.held[pod], self.epochs[pod] = set(blocks), epoch
                return
        loading.close()

    @rule(pod=pods, epoch=epochs, blocks=block_lists)
    def store(self, pod: str, epoch: str, blocks: list[int]) -> None:
        added = self.index.store(pod, epoch, self.hashes(blocks))
        if self.epochs.get(pod) == epoch:
            assert added == len(set(blocks) - self.held[pod])
            self.held[pod] |= set(blocks)
        else:
            assert added == 0

    @rule(pod=pods, epoch=epochs, blocks=block_lists)
    def remove(self, pod: str, epoch: str, blocks: list[int]) -> None:
        removed = self.index.remove(pod, epoch, self.hashes(blocks))
        if self.epochs.get(pod) == epoch:
            assert removed == len(set(blocks) & self.held[pod])
            self.held[pod] -= set(blocks)
        else:
            assert removed == 0

    @rule(pod=pods, epoch=epochs)
    def clear(self, pod: str, epoch: str) -> None:
        assert self.index.clear(pod, epoch) == (self.epochs.get(pod) == epoch)
        if self.epochs.get(pod) == epoch:
            self.held[pod] = set()

    @rule(pod=pods)
    def drop(self, pod: str) -> None:
        assert self.index.drop(pod) == (pod in self.held)
        self.held.pop(pod, None)
        self.epochs.pop(pod, None)

    @rule(budget=st.integers(1, 5_000))
    def sweep(self, budget: int) -> None:
        self.index.sweep(budget)

    @rule()
    def sweep_all(self) -> None:
        while self.index.sweep():
            pass
        stats = self.index.stats()
        assert stats.blocks == len(set().union(*self.held.values()))
        by_block: dict[int, frozenset[str]] = {}
        for block in range(BLOCKS):
            by_block[block] = frozenset(pod for pod, blocks in self.held.items() if block in blocks)
        assert stats.pod_sets == len({holders for holders in by_block.values() if holders})

    @rule(chain=st.permutations(range(BLOCKS)), length=st.integers(0, BLOCKS))
    def match_any_chain(self, chain: list[int], length: int) -> None:
        chain = chain[:length]
        assert self.index.match(self.hashes(chain)) == naive_match(self.held, chain)

    @invariant()
    def match_and_counts_agree(self) -> None:
        chain = list(range(BLOCKS))
        assert self.index.match(self.hashes(chain)) == naive_match(self.held, chain)
        assert self.index.pods() == self.epochs
        for pod in PODS:
            assert self.index.blocks(pod) == len(self.held.get(pod, ()))
        assert self.index.stats().entries == sum(map(len, self.held.values()))


TestTheIndexEqualsADictOfSets = IndexMachine.TestCase
TestTheIndexEqualsADictOfSets.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_large_random_operations_over_200_pods_agree_with_sets() -> None:
    rng = np.random.default_rng(11)
    universe = rng.integers(0, 2**64, 30_000, dtype=np.uint64)
    index, held = PrefixIndex(seed=2), dict[str, set[int]]()
    for step in range(600):
        pod = f"p{rng.integers(200)}"
        start, length = int(rng.integers(29_000)), int(rng.integers(1, 1_000))
        blocks = universe[start : start + length]
        kind = rng.random()
        if pod not in held or kind < 0.2:
            index.replace_pod(pod, "e", blocks)
            held[pod] = set(blocks.tolist())
        elif kind < 0.7:
            index.store(pod, "e", blocks)
            held[pod] |= set(blocks.tolist())
        elif kind < 0.95:
            index.remove(pod, "e", blocks)
            held[pod] -= set(blocks.tolist())
        else:
            index.drop(pod)
            del held[pod]
        if step % 20 == 0:
            start = int(rng.integers(29_000))
            chain = universe[start : start + 512]
            assert index.match(chain) == naive_match(held, chain.tolist())
    assert {pod: index.blocks(pod) for pod in held} == {pod: len(blocks) for pod, blocks in held.items()}
    while index.sweep():
        pass
    assert index.stats().blocks == len(set().union(*held.values()))


def test_a_restarted_pod_scores_zero_at_once() -> None:  # P19
    index = PrefixIndex(seed=1)
    chain = list(range(1, 100))
    index.replace_pod("a", "uid-1", chain)
    index.replace_pod("a", "uid-2", [])
    assert index.match(chain) == {}
    assert index.store("a", "uid-1", chain) == 0
    assert index.match(chain) == {}
    assert index.store("a", "uid-2", chain[:3]) == 3
    assert index.match(chain) == {"a": 3}


def test_events_of_a_pod_that_was_never_introduced_are_ignored() -> None:
    index = PrefixIndex(seed=1)
    assert index.store("a", "e", [1, 2]) == 0
    assert index.remove("a", "e", [1]) == 0
    assert not index.clear("a", "e")
    assert not index.drop("a")
    assert index.match([1, 2]) == {}


def test_pods_that_restart_for_ever_do_not_grow_the_index() -> None:
    index = PrefixIndex(seed=1)
    for life in range(500):
        index.replace_pod("a", f"e{life}", range(life * 100, life * 100 + 100))
    stats = index.stats()
    assert stats.blocks < 500
    assert stats.bytes < 1 << 20


def test_old_blocks_are_matched_until_a_stepwise_load_is_done() -> None:
    index = PrefixIndex(seed=1)
    index.replace_pod("a", "e", [1, 2, 3])
    loading = index.load_pod("a", "e", [1, 2, 3, 4, 5], chunk=2)
    next(loading)
    assert index.match([1, 2, 3, 4, 5]) == {"a": 3}
    for _ in loading:
        pass
    assert index.match([1, 2, 3, 4, 5]) == {"a": 5}


@pytest.mark.parametrize("pods", [1, 63, 64, 65, 130, 1_000])
def test_one_block_can_be_held_by_any_number_of_pods(pods: int) -> None:
    index = PrefixIndex(seed=1)
    for number in range(pods):
        index.replace_pod(f"p{number}", "e", range(10 + number))
    depths = index.match(range(5_000))
    assert depths == {f"p{number}": 10 + number for number in range(pods)}


def test_all_pods_reloading_at_once_leave_nothing_behind() -> None:
    rng = np.random.default_rng(4)
    universe = rng.integers(0, 2**64, 5_000, dtype=np.uint64)
    index, held = PrefixIndex(seed=1), dict[str, set[int]]()
    for round_ in range(4):
        for number in range(150):
            start = int(rng.integers(4_000))
            blocks = universe[start : start + 700]
            index.replace_pod(f"p{number}", f"e{round_}", blocks)
            held[f"p{number}"] = set(blocks.tolist())
    while index.sweep(1_000):
        pass
    stats = index.stats()
    assert stats.blocks == len(set().union(*held.values()))
    holders = {block: frozenset(p for p in held if block in held[p]) for block in universe.tolist()}
    assert stats.pod_sets == len({pods for pods in holders.values() if pods})
    chain = universe[3_000:3_512]
    assert index.match(chain) == naive_match(held, chain.tolist())
