"""How many requests a pod is given, from its load report and what is on its way."""

import pytest
from admission_helpers import report

from leadline.gateway.admission.capacity import UNLIMITED, spare_capacity, unsaturated
from leadline.gateway.pods import Pod


def pod(**fields: object) -> Pod:
    made = Pod("p0", "a:1")
    if fields:
        made.heartbeat(report(**fields), 100.0)
    return made


def test_a_pod_that_never_reported_is_never_full() -> None:
    assert spare_capacity(pod(), 100.0) == UNLIMITED


def test_a_configured_limit_counts_requests_in_flight() -> None:
    made = pod()
    leases = [made.lease(prefill_tokens=1, blocks=1, now=100.0) for _ in range(3)]
    assert spare_capacity(made, 100.0, concurrency=4) == 1
    leases[0].close()
    assert spare_capacity(made, 100.0, concurrency=4) == 2


@pytest.mark.parametrize(
    ("running", "waiting", "expected"), [(0, 0, 20), (16, 0, 4), (16, 4, 0), (16, 9, 0), (3, 0, 17)]
)
def test_a_reported_limit_leaves_a_short_queue_in_the_pod(running: int, waiting: int, expected: int) -> None:
    made = pod(max_concurrent_requests=16, running=running, waiting=waiting)
    assert spare_capacity(made, 100.0, pod_queue=4) == expected


def test_requests_on_their_way_are_counted_on_top_of_the_report() -> None:
    made = pod(max_concurrent_requests=16, running=15)
    made.lease(prefill_tokens=1, blocks=1, now=100.1)
    assert spare_capacity(made, 100.1, pod_queue=0) == 0


def test_a_pod_whose_memory_is_full_gets_only_a_short_queue() -> None:
    assert (
        spare_capacity(pod(max_concurrent_requests=256, running=40, free_blocks=0), 100.0, pod_queue=4) == 4
    )
    assert (
        spare_capacity(
            pod(max_concurrent_requests=256, running=40, waiting=3, free_blocks=0), 100.0, pod_queue=4
        )
        == 1
    )
    assert (
        spare_capacity(
            pod(max_concurrent_requests=256, running=40, waiting=4, free_blocks=0), 100.0, pod_queue=4
        )
        == 0
    )


def test_a_pod_that_lets_many_wait_is_full_whatever_its_limit() -> None:
    assert spare_capacity(pod(running=5, waiting=9), 100.0, pod_queue=8) == 0
    assert spare_capacity(pod(running=5, waiting=8), 100.0, pod_queue=8) == UNLIMITED


def test_a_stale_report_leaves_what_this_gateway_has_in_flight() -> None:
    made = pod(max_concurrent_requests=16, running=16, waiting=50, free_blocks=0)
    assert spare_capacity(made, 100.0, pod_queue=4) == 0
    assert spare_capacity(made, 200.0, pod_queue=4) == 20


def test_only_pods_with_spare_capacity_are_unsaturated() -> None:
    full, free = pod(max_concurrent_requests=1, running=9), pod(max_concurrent_requests=16)
    assert unsaturated([full, free], 100.0) == [free]
