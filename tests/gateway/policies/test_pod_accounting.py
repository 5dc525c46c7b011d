"""Requests in flight: counted once, whatever happens, and never below zero (P16)."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from routing_helpers import report, reported

from leadline.gateway.pods import REPORT_LAG, STALE_REPORT, Lease, Pod, eligible


class AccountingMachine(RuleBasedStateMachine):
    """Leases opened, advanced, closed (repeatedly) and reports of any load and epoch, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pod = Pod("a", "a:1")
        self.now = 100.0
        self.leases: list[Lease] = []
        self.open: set[Lease] = set()

    @rule(tokens=st.integers(-5, 5_000), blocks=st.integers(-1, 80))
    def opens(self, tokens: int, blocks: int) -> None:
        lease = self.pod.lease(prefill_tokens=tokens, blocks=blocks, now=self.now)
        self.leases.append(lease)
        self.open.add(lease)

    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        if self.leases:
            data.draw(st.sampled_from(self.leases)).first_token()

    @rule(data=st.data())
    def closes(self, data: st.DataObject) -> None:
        if self.leases:
            lease = data.draw(st.sampled_from(self.leases))
            lease.close()
            self.open.discard(lease)

    @rule(data=st.data())
    def fails_inside_a_with(self, data: st.DataObject) -> None:
        if self.leases:
            lease = data.draw(st.sampled_from(self.leases))
            with pytest.raises(RuntimeError), lease:
                raise RuntimeError
            self.open.discard(lease)

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.06, 1.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        epoch=st.sampled_from(["e1", "e2"]),
        age=st.sampled_from([0.0, 5.0]),
        running=st.integers(0, 5),
        queued=st.integers(0, 10_000),
        free=st.integers(0, 100),
    )
    def heartbeat(self, epoch: str, age: float, running: int, queued: int, free: int) -> None:
        load = report(
            "a",
            time=self.now - age,
            epoch=epoch,
            running=running,
            queued_prefill_tokens=queued,
            free_blocks=free,
            total_blocks=100,
        )
        self.pod.heartbeat(load, self.now)

    @invariant()
    def nothing_is_negative_and_open_leases_are_counted_once(self) -> None:
        pod = self.pod
        assert pod.in_flight == len(self.open)
        assert pod.in_flight_prefill_tokens == sum(
            lease.prefill_tokens for lease in self.open if lease._prefilling
        )
        assert set(pod._unseen) <= self.open
        assert pod._unseen_prefill_tokens == sum(
            lease.prefill_tokens for lease in pod._unseen if lease._prefilling
        )
        assert pod._unseen_blocks == sum(lease.blocks for lease in pod._unseen)
        assert pod.requests(self.now) >= 0
        assert pod.queued_prefill_tokens(self.now) >= 0
        assert pod._gone_requests >= 0
        assert pod._gone_blocks >= 0
        free = pod.free_blocks(self.now)
        assert free is None or free <= 100

    def teardown(self) -> None:
        for lease in self.leases:
            lease.close()
        pod = self.pod
        assert pod.in_flight == pod.in_flight_prefill_tokens == 0
        assert pod._unseen_prefill_tokens == pod._unseen_blocks == len(pod._unseen) == 0


TestAccounting = AccountingMachine.TestCase
TestAccounting.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_request_counts_until_the_pod_has_reported_it_and_not_twice() -> None:
    pod = reported("a", now=0, running=2, queued_prefill_tokens=0)
    lease = pod.lease(prefill_tokens=5_000, blocks=80, now=0.5)
    assert pod.requests(0.5) == 3
    assert pod.queued_prefill_tokens(0.5) == 5_000
    assert pod.free_blocks(0.5) == 920
    pod.heartbeat(report("a", time=1, running=3, queued_prefill_tokens=1_000, free_blocks=920), 1)
    assert pod.requests(1) == 3
    assert pod.queued_prefill_tokens(1) == 1_000
    assert pod.free_blocks(1) == 920
    lease.close()
    assert pod.requests(1.1) == 2
    assert pod.free_blocks(1.1) == 1_000


def test_a_report_made_just_after_a_request_was_sent_does_not_cover_it() -> None:
    pod = Pod("a", "a:1")
    pod.lease(prefill_tokens=100, blocks=2, now=1)
    pod.heartbeat(report("a", time=1), 1 + REPORT_LAG / 2)
    assert pod.requests(1.03) == 1
    pod.heartbeat(report("a", time=2), 2)
    assert pod.requests(2) == 0


def test_the_reported_queue_drains_at_the_pod_s_rate() -> None:
    pod = reported("a", now=0, queued_prefill_tokens=8_000)
    assert pod.queued_prefill_tokens(0.5) == 3_000
    assert pod.queued_prefill_tokens(2) == 0


def test_the_first_token_ends_a_prefill() -> None:
    pod = Pod("a", "a:1")
    with pod.lease(prefill_tokens=700, blocks=1, now=0) as lease:
        lease.first_token()
        lease.first_token()
        assert pod.queued_prefill_tokens(0) == 0
        assert pod.in_flight == 1
    assert pod.in_flight == 0


def test_without_fresh_reports_the_gateway_s_own_requests_are_the_load() -> None:  # P15
    pod = reported("a", now=0, running=9, queued_prefill_tokens=10**9)
    late = STALE_REPORT + 1
    pod.lease(prefill_tokens=300, blocks=5, now=late)
    assert pod.requests(late) == 1
    assert pod.queued_prefill_tokens(late) == 300
    assert pod.free_blocks(late) is None


def test_a_restart_voids_the_load_of_the_old_life() -> None:  # P19
    pod = reported("a", now=0, running=9, queued_prefill_tokens=50_000, free_blocks=0)
    old = pod.lease(prefill_tokens=300, blocks=5, now=0)
    pod.heartbeat(report("a", time=1, epoch="e2"), 1)
    assert pod.epoch == "e2"
    assert pod.requests(1) == 0
    assert pod.queued_prefill_tokens(1) == 0
    assert pod.free_blocks(1) == 1_000
    pod.heartbeat(report("a", time=2, epoch="e2", running=4), 2)
    old.close()
    assert pod.requests(2) == 4
    assert pod.in_flight == 0


def test_an_older_report_of_the_same_epoch_is_ignored() -> None:
    pod = reported("a", now=5, running=1)
    pod.heartbeat(report("a", time=3, running=7), 6)
    assert pod.requests(6) == 1


def test_a_pod_whose_clock_was_set_back_is_heard() -> None:
    pod = reported("a", now=5_000, running=1)
    for second in (1, 2, 3):
        pod.heartbeat(report("a", time=1_000 + second, running=5 + second), 5_000 + second)
    assert pod.requests(5_003) == 8


class _Open:
    def allows(self, now: float) -> bool:
        return False


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, True),
        ({"ready": False}, False),
        ({"terminating": True}, False),
        ({"circuit": _Open()}, False),
    ],
)
def test_only_pods_that_take_requests_are_eligible(change: dict[str, object], kept: bool) -> None:  # P8
    pod = Pod("a", "a:1", **change)
    assert eligible([pod], now=0) == ([pod] if kept else [])


def test_a_pod_that_reports_draining_is_not_eligible_and_keeps_its_requests() -> None:  # P8
    pod = Pod("a", "a:1")
    lease = pod.lease(prefill_tokens=10, blocks=1, now=0)
    pod.heartbeat(report("a", time=1, draining=True), 1)
    assert eligible([pod], now=1) == []
    assert pod.in_flight == 1
    lease.close()
    assert pod.in_flight == 0


def test_a_pod_without_heartbeats_stays_eligible() -> None:  # P15
    pod = Pod("a", "a:1")
    assert eligible([pod], now=1e9) == [pod]
