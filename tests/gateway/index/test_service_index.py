"""Real blocks and guesses together, as routing sees them."""

import pytest

from leadline.gateway.index.service_index import ServiceIndex
from leadline.protocol.events import CacheSnapshot, EventBatch


@pytest.fixture
def index() -> ServiceIndex:
    index = ServiceIndex(speculative_ttl=5, stale_after=60, seed=1)
    index.heard(0)
    index.pod_seen("a", "e1")
    index.pod_seen("b", "e2")
    return index


def test_a_routed_request_is_matched_before_its_events_arrive(index: ServiceIndex) -> None:
    chain = [1, 2, 3, 4]
    index.batch(EventBatch(epoch="e1", seq=0, stored=[1, 2]))
    held = index.match(chain, now=1)
    assert held == {"a": 2}
    index.routed("a", chain, held["a"], now=1)
    assert index.match(chain, now=2) == {"a": 4}
    assert index.match([1, 2, 3, 9], now=2) == {"a": 3}
    assert index.match(chain, now=6) == {"a": 2}


def test_the_real_event_takes_the_guess_s_place(index: ServiceIndex) -> None:
    index.routed("a", [1, 2, 3], 0, now=1)
    assert index.speculative_entries == 3
    index.batch(EventBatch(epoch="e1", seq=0, stored=[1, 2, 3]))
    assert index.speculative_entries == 0
    assert index.match([1, 2, 3], now=50) == {"a": 3}


def test_an_eviction_ends_the_guess_too(index: ServiceIndex) -> None:
    index.batch(EventBatch(epoch="e1", seq=0, stored=[1]))
    index.routed("a", [1, 2], 1, now=1)
    index.batch(EventBatch(epoch="e1", seq=1, removed=[1, 2]))
    assert index.match([1, 2], now=1) == {}


def test_guesses_die_with_the_pod_s_epoch(index: ServiceIndex) -> None:  # P19, P20
    index.routed("a", [1, 2, 3], 0, now=1)
    index.pod_seen("a", "e1-restarted")
    assert index.match([1, 2, 3], now=1.1) == {}
    assert index.speculative_entries == 0


def test_guesses_die_when_the_pod_clears_its_cache_or_leaves(index: ServiceIndex) -> None:
    index.routed("a", [1, 2, 3], 0, now=1)
    index.routed("b", [1], 0, now=1)
    index.batch(EventBatch(epoch="e1", seq=0, cleared=True))
    assert index.match([1, 2, 3], now=1.1) == {"b": 1}
    index.pod_gone("b")
    assert index.match([1, 2, 3], now=1.1) == {}


def test_when_nothing_is_heard_for_long_only_own_recent_routes_count(index: ServiceIndex) -> None:  # P15
    index.batch(EventBatch(epoch="e1", seq=0, stored=[1, 2]))
    assert index.match([1, 2], now=60) == {"a": 2}
    assert not index.fresh(61)
    index.routed("b", [1, 2], 0, now=61)
    assert index.match([1, 2], now=61) == {"b": 2}
    index.heard(62)
    assert index.match([1, 2], now=62) == {"a": 2, "b": 2}


def test_a_snapshot_reload_in_the_same_epoch_keeps_guesses(index: ServiceIndex) -> None:
    index.routed("a", [1, 2, 3], 0, now=1)
    index.distrust()
    index.snapshot("a", CacheSnapshot(epoch="e1", seq=4, packed=CacheSnapshot.pack([1])))
    assert index.match([1, 2, 3], now=2) == {"a": 3}
    assert index.stats().entries == 1
    while index.maintain(now=10):
        pass
    assert index.match([1, 2, 3], now=10) == {"a": 1}


def test_an_empty_chain_matches_nobody(index: ServiceIndex) -> None:
    assert index.match([], now=1) == {}
