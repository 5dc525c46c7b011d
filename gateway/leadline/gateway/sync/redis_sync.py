"""One service's reader of Redis: heartbeats, snapshots and the event stream, for as long as the gateway runs.

    each `poll_seconds`   HGETALL …:pods ─▶ Pod.heartbeat, index.pod_seen / pod_gone
                          index.reloads() ─▶ GET …:snapshot:<pod>, then replay the stream from the snapshot's
                                             position up to ours (batches known already are ignored)
    in between            XREAD BLOCK …:events from our position ─▶ index.batch

Every loss is repaired: a gap in a pod's numbers, or a heartbeat that names a batch we have not seen though we
have read the stream to its end, makes the index ask for that pod's snapshot, until one arrives that is new
enough. So trimming, flushing, failover and our own absence need one special case only: a server whose stream
ends before our position is another server, and is read from its beginning.

Failures end the session; the next begins after a pause that doubles up to `max_backoff` and is drawn at
random. Meanwhile routing goes on with what is known: reports stop counting after pods.STALE_REPORT, the index
after its `stale_after`, and then this gateway's own requests are all that is left to go by (P15).
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Sequence

from redis.exceptions import RedisError, ResponseError

from leadline.gateway.index.service_index import ServiceIndex
from leadline.gateway.index.stream import Outcome
from leadline.gateway.redis_client import connect, redacted
from leadline.gateway.sync.counts import SyncCounts
from leadline.gateway.sync.heartbeats import FindPod, Heartbeats
from leadline.gateway.sync.snapshots import START, Snapshots, SyncTiming, order, text_of
from leadline.protocol.events import decode_batch
from leadline.protocol.keys import ServiceKeys
from leadline.protocol.load import LoadReport
from leadline.protocol.wire import WireError

__all__ = ["RedisSync"]

logger = logging.getLogger("leadline.gateway.sync")

FIELD = b"b"

Entries = Sequence[tuple[bytes, dict[bytes, bytes]]]


class RedisSync:
    """Create, `start` (or await `run`), `stop`. Everything happens on the event loop it is started on."""

    def __init__(
        self,
        keys: ServiceKeys,
        redis_url: str,
        index: ServiceIndex,
        find_pod: FindPod,
        *,
        timing: SyncTiming | None = None,
        heartbeats: Heartbeats | None = None,
    ) -> None:
        """Raises ValueError for a URL that cannot be read."""
        self.keys = keys
        self.counts = SyncCounts()
        self._index = index
        self._find_pod = find_pod
        self._timing = timing or SyncTiming()
        self._heartbeats = heartbeats or Heartbeats()
        self._place = redacted(redis_url)
        self._redis = connect(redis_url, self._timing.poll_seconds + self._timing.timeout)
        self._task: asyncio.Task[None] | None = None
        self._names: dict[str, str] = {}
        """Name in reports → pod id."""
        self._owners: dict[str, str] = {}
        """Pod id → the name that reported it last."""
        self._expected: dict[str, tuple[str, int]] = {}
        """Pod id → (epoch, batch) that its last heartbeat named, to be found in the stream."""
        self._snapshots = Snapshots(self._redis, keys, index, self._timing, self.counts)
        self._asked: dict[str, None] = {}
        """Epochs that batches named and no heartbeat did, once looked for."""
        self._position: str | None = None
        self._next_poll = 0.0
        self._eager_until = 0.0
        self._gaps = index.gaps
        self._failed = False
        self._stopping = False

    def start(self) -> None:
        """Begin to read in a task of its own."""
        if self._task is None:
            self._stopping = False
            self._task = asyncio.create_task(
                self.run(), name=f"sync {self.keys.namespace}/{self.keys.service}"
            )

    async def stop(self) -> None:
        """End the task and the connection. May be called twice.

        redis-py sends within `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that comes
        in the moment that the sending ends; each one may be, so the loops look at a flag as well."""
        task, self._task = self._task, None
        self._stopping = True
        if task is not None:
            while not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=0.1)
        with contextlib.suppress(Exception):
            await self._redis.aclose()

    async def run(self) -> None:
        """Read until cancelled. Raises nothing else."""
        backoff = 0.1
        while not self._stopping:
            began = time.monotonic()
            try:
                await self._session()
            except (RedisError, OSError, TimeoutError) as error:
                self._note_failure(error)
            except Exception:
                logger.exception("reading from Redis at %s failed unexpectedly", self._place)
                self.counts.failures += 1
            self.counts.connected = False
            if time.monotonic() - began > self._timing.max_backoff:
                backoff = 0.1
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, self._timing.max_backoff)

    async def _session(self) -> None:
        self._heartbeats.resumed(time.monotonic())
        self._next_poll = 0.0
        while not self._stopping:
            if time.monotonic() >= self._next_poll:
                await self._poll()
                self._note_success()
            await self._read()

    # -- heartbeats ------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.hgetall(self.keys.pods)
        pipeline.xrevrange(self.keys.events, count=1)
        fields, last = await pipeline.execute()
        now = time.monotonic()
        timing = self._timing
        self._next_poll = now + (
            timing.eager_poll_seconds if now < self._eager_until else timing.poll_seconds
        )
        end = text_of(last[0][0]) if last else START
        if self._position is None:
            self._position = end
        elif order(end) < order(self._position):
            logger.warning("the event stream of %s begins anew", self.keys.events)
            self._position = START
        changes = self._heartbeats.read(fields, now, time.time())
        for number, report in enumerate(changes.reports):
            self._heartbeat(report, now)
            if number % 50 == 49:
                await asyncio.sleep(0)
        for name in changes.silent:
            self._gone(name)
        if changes.dead:
            with contextlib.suppress(ResponseError):  # a replica, or a user that may only read
                await self._redis.hdel(self.keys.pods, *changes.dead)
        loaded_at = await self._snapshots.load(self._owners, now)
        if loaded_at is not None:
            await self._replay(loaded_at)

    def _heartbeat(self, report: LoadReport, now: float) -> None:
        self.counts.heartbeats += 1
        pod = self._find_pod(report)
        if pod is None or self._names.get(report.pod, pod.id) != pod.id:
            self._gone(report.pod)
        if pod is None:
            return
        self._names[report.pod] = pod.id
        self._owners[pod.id] = report.pod
        if self._index.pod_seen(pod.id, report.epoch):
            self._snapshots.look_at_once(pod.id)
        pod.heartbeat(report, now)
        self._expected[pod.id] = (report.epoch, report.cache_seq)

    def _gone(self, name: str) -> None:
        pod = self._names.pop(name, None)
        # Another name may report for the same pod by now: a static address whose process was replaced.
        if pod is not None and self._owners.get(pod) == name:
            del self._owners[pod]
            self._expected.pop(pod, None)
            self._snapshots.look_at_once(pod)
            self._index.pod_gone(pod)

    # -- events ----------------------------------------------------------------------------------------------

    async def _replay(self, begin: str) -> None:
        """Read again what stands between a snapshot and our position. One pass serves all snapshots."""
        assert self._position is not None
        while order(begin) < order(self._position):
            entries: Entries = await self._redis.xrange(
                self.keys.events, f"({begin}", self._position, count=self._timing.read_count
            )
            await self._feed(entries)
            if len(entries) < self._timing.read_count:
                return
            begin = text_of(entries[-1][0])

    async def _read(self) -> None:
        wait = max(1, int((self._next_poll - time.monotonic()) * 1000))
        reply = await self._redis.xread(
            {self.keys.events: self._position}, count=self._timing.read_count, block=wait
        )
        now = time.monotonic()
        self._index.heard(now)
        entries: Entries = reply[0][1] if reply else ()
        if entries:
            # Before feeding: whatever a batch breaks, it does so once, and the gap it leaves is mended.
            self._position = text_of(entries[-1][0])
            self.counts.lag_seconds = max(0.0, time.time() - order(self._position)[0] / 1000)
            await self._feed(entries)
        else:
            self.counts.lag_seconds = 0.0
            self._index.maintain(now)
        if len(entries) < self._timing.read_count:
            # Everything that was in the stream when the heartbeats were read has been read now.
            for pod, (epoch, seq) in self._expected.items():
                self._index.expect(pod, epoch, seq)
            self._expected.clear()

    async def _feed(self, entries: Entries) -> None:
        since = 0
        for _, fields in entries:
            try:
                batch = decode_batch(fields.get(FIELD, b""))
            except WireError:
                self.counts.events["garbage"] += 1
                continue
            outcome = self._index.batch(batch)
            self.counts.events[outcome.value] += 1
            if self._index.gaps != self._gaps:
                self._gaps = self._index.gaps
                self._next_poll = 0.0
            elif outcome is Outcome.UNKNOWN_EPOCH and batch.epoch not in self._asked:
                # A pod has begun a new epoch, or ended an old one: its heartbeat is there or will come at
                # once.
                self._asked[batch.epoch] = None
                self._next_poll = 0.0
                self._eager_until = time.monotonic() + 1.0
                if len(self._asked) > 1_000:
                    del self._asked[next(iter(self._asked))]
            # A batch costs about as much as a hundred hashes; others get their turn every two milliseconds.
            since += 100 + len(batch.stored) + len(batch.removed)
            if since > 2_000:
                since = 0
                await asyncio.sleep(0)

    # -- failures --------------------------------------------------------------------------------------------

    def _note_failure(self, error: Exception) -> None:
        self.counts.failures += 1
        if not self._failed:
            self._failed = True
            logger.warning(
                "cannot read from Redis at %s: %s: %s; routing on with what is known, trying again",
                self._place,
                type(error).__name__,
                error,
            )

    def _note_success(self) -> None:
        self.counts.connected = True
        if self._failed:
            self._failed = False
            logger.info("reading from Redis at %s again", self._place)
