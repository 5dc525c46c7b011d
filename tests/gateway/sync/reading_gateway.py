"""A gateway's index and pods, fed by a real RedisSync."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterable

from leadline.gateway.index.service_index import ServiceIndex
from leadline.gateway.pods import Pod
from leadline.gateway.sync.heartbeats import Heartbeats, find_in
from leadline.gateway.sync.redis_sync import RedisSync
from leadline.gateway.sync.snapshots import SyncTiming
from live_valkey import KEYS, PoolPod

QUICK = SyncTiming(
    poll_seconds=0.1, eager_poll_seconds=0.02, timeout=0.5, max_backoff=0.3, max_reload_backoff=0.4
)


class ReadingGateway:
    def __init__(
        self,
        url: str,
        names: Iterable[str] = ("pod-a",),
        *,
        timing: SyncTiming = QUICK,
        heartbeats: Heartbeats | None = None,
        stale_after: float = 60.0,
    ) -> None:
        self.pods = {name: Pod(name, f"{name}:8000") for name in names}
        self.index = ServiceIndex(stale_after=stale_after)
        self.sync = RedisSync(KEYS, url, self.index, find_in(self.pods), timing=timing, heartbeats=heartbeats)

    def knows(self, pod: PoolPod) -> bool:
        """Whether the index has exactly what the pod's pool holds, in its present epoch."""
        index, hashes = self.index, pod.hashes()
        if index._real.pods().get(pod.name) != pod.publisher.epoch or not index.in_step(pod.name):
            return False
        return index._real.blocks(pod.name) == len(hashes) and all(self.holds(pod.name, h) for h in hashes)

    def holds(self, pod: str, block: int) -> bool:
        return pod in self.index.match([block], time.monotonic())


@contextlib.asynccontextmanager
async def reading(*gateways: ReadingGateway) -> AsyncIterator[None]:
    for gateway in gateways:
        gateway.sync.start()
    try:
        yield
    finally:
        for gateway in gateways:
            await gateway.sync.stop()
