"""Snapshots of pods' caches: looked for while the index asks for them, loaded in steps.

A snapshot is true at a position of the event stream. What stands behind that position in the stream must be
read again once it is loaded, which is redis_sync.py's part.
"""

import asyncio
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leadline.gateway.index.service_index import ServiceIndex
from leadline.gateway.index.stream import Outcome
from leadline.gateway.sync.counts import SyncCounts
from leadline.protocol.events import CacheSnapshot, decode_snapshot
from leadline.protocol.keys import ServiceKeys
from leadline.protocol.wire import WireError

__all__ = ["START", "Snapshots", "SyncTiming", "order", "text_of"]


@dataclass(slots=True, frozen=True)
class SyncTiming:
    """Seconds, but for the count."""

    poll_seconds: float = 0.5
    eager_poll_seconds: float = 0.1
    """For a second after batches of an unknown epoch: some pod has just begun a new epoch."""
    timeout: float = 3.0
    """Of one reply, beyond the time it is meant to block."""
    max_backoff: float = 5.0
    max_reload_backoff: float = 8.0
    """Between two looks at the snapshot of a pod whose snapshot is not new enough."""
    read_count: int = 500
    """Stream entries a read."""


START = "0-0"
"""In front of every entry."""


def text_of(stream_id: bytes | str) -> str:
    return stream_id.decode() if isinstance(stream_id, bytes) else stream_id


def order(stream_id: str) -> tuple[int, int]:
    """Compares as the entries lie in the stream; the first number is Redis's clock, in milliseconds. Raises
    ValueError for what is no id."""
    milliseconds, _, number = stream_id.partition("-")
    return int(milliseconds), int(number or 0)


logger = logging.getLogger("leadline.gateway.sync")


class Snapshots:
    """Those of one service's pods."""

    def __init__(
        self, redis: Any, keys: ServiceKeys, index: ServiceIndex, timing: SyncTiming, counts: SyncCounts
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._index = index
        self._timing = timing
        self._counts = counts
        self._retries: dict[str, tuple[float, float]] = {}
        """Pod id → (when to look at its snapshot again, seconds to wait after that)."""

    def look_at_once(self, pod: str) -> None:
        """Ask for the pod's snapshot at once: it has begun a new epoch, or is gone, and earlier waits are
        void."""
        self._retries.pop(pod, None)

    async def load(self, reporters: Mapping[str, str], now: float) -> str | None:
        """Load what the index asks for and Redis has. `reporters`: pod id → the name under which it reports.

        Returns the earliest position at which one of those loaded is true; None if none was.
        """
        wanted = self._index.reloads()
        self._retries = {pod: self._retries[pod] for pod in wanted if pod in self._retries}
        earliest: str | None = None
        for pod in wanted:
            name = reporters.get(pod)
            if name is None or not self._due(pod, now):
                continue
            snapshot = await self._get(name)
            if snapshot is None:
                continue
            outcome = await self._into_index(pod, snapshot)
            self._counts.reloads[outcome.value] += 1
            if outcome is Outcome.APPLIED:
                place = snapshot.stream_id or START
                earliest = place if earliest is None else min(earliest, place, key=order)
        return earliest

    # -- inside ----------------------------------------------------------------------------------------------

    def _due(self, pod: str, now: float) -> bool:
        """Whether to look now; if so, the next look is later than the last pause was long."""
        due, delay = self._retries.get(pod, (0.0, self._timing.poll_seconds))
        if now < due:
            return False
        self._retries[pod] = (
            now + delay * random.uniform(0.7, 1.0),
            min(delay * 2, self._timing.max_reload_backoff),
        )
        return True

    async def _get(self, name: str) -> CacheSnapshot | None:
        data = await self._redis.get(self._keys.snapshot(name))
        if data is None:
            self._counts.reloads["absent"] += 1
            return None
        try:
            snapshot = decode_snapshot(data)
            order(snapshot.stream_id or START)
        except (WireError, ValueError) as error:
            self._counts.reloads["garbage"] += 1
            logger.warning("the snapshot of %s cannot be read: %s", name, error)
            return None
        return snapshot

    async def _into_index(self, pod: str, snapshot: CacheSnapshot) -> Outcome:
        steps = self._index.load_snapshot(pod, snapshot)
        try:
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    outcome: Outcome = end.value
                    return outcome
                await asyncio.sleep(0)
        finally:
            steps.close()
