"""How many more requests a pod should be given now.

Pure. A request that waits in the gateway can still go to the pod that is free
first, and in fair order; a request that waits inside a pod cannot. So a pod is given what it runs at once and
a short queue (`pod_queue`) that keeps it busy between load reports, and no more:

    capacity = limit + pod_queue - requests    limit: reported by the pod, or unlimited until it reports
    capacity = configured limit - requests     where `pod_concurrency` is set
    capacity ≤ pod_queue - its waiting         once its KV memory is full, or more requests wait there

`requests` are those the pod reported plus this gateway's own that are not in the report yet (pods.py). Other
gateways' newest requests are not in it: with several gateways a pod may be over by what they send within one
heartbeat, and its own queue takes that.
"""

import sys
from collections.abc import Iterable

from leadline.gateway.pods import STALE_REPORT, Pod

__all__ = ["UNLIMITED", "spare_capacity", "unsaturated"]

UNLIMITED = sys.maxsize
"""Spare capacity of a pod whose limit is unknown."""


def spare_capacity(pod: Pod, now: float, *, concurrency: int = 0, pod_queue: int = 8) -> int:
    """Return how many more requests the pod can take; 0 when it is saturated. `concurrency`: the configured
    limit, 0 for none."""
    report = pod.report
    if report is None and not concurrency:
        return UNLIMITED
    requests, _, free_blocks = pod.load(now)
    if concurrency:
        left = concurrency - requests
    elif report is not None and report.max_concurrent_requests:
        left = report.max_concurrent_requests + pod_queue - requests
    else:
        left = UNLIMITED
    if report is not None and now - pod.reported_at <= STALE_REPORT:
        full = free_blocks is not None and free_blocks <= 0
        if full or report.waiting > pod_queue:
            # requests = running + waiting + unseen - gone: whatever came on top since the report waits too.
            waiting = max(0, requests - report.running)
            left = min(left, max(1, pod_queue) - waiting)
    return max(0, left)


def unsaturated(pods: Iterable[Pod], now: float, *, concurrency: int = 0, pod_queue: int = 8) -> list[Pod]:
    """Return the pods with spare capacity, in the order given."""
    return [pod for pod in pods if spare_capacity(pod, now, concurrency=concurrency, pod_queue=pod_queue)]
