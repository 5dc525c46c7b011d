"""The asyncio task of the API process that tells Redis about this engine, whatever becomes of Redis.

    on a change      XADD …:events          batches, at most one round each `batch_seconds`
    now and then     SET  …:snapshot:<pod>  while the cache changes, or when the key is gone; with a TTL
    each second      HSET …:pods <pod>      the load report; renews the snapshot's TTL

One task does all of it, one command after the other, so a snapshot's stream position is exact: it is the id
of the last batch it contains. Any failure (refused, timed out, an error reply) ends the round; what was cut
is sent again, under the same numbers, after a pause that doubles up to `max_backoff` and is drawn at random.
After an outage the snapshot is rewritten, since the server that is back may be an empty one (P15).

Nothing here raises into the server, and nothing waits for it. The password in the URL is never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from leadline.engine.core.stats import SchedulerStats, Speeds
from leadline.engine.errors import ConfigError
from leadline.engine.publisher.log import CacheLog
from leadline.engine.publisher.settings import PublishSettings, redacted
from leadline.engine.wire import CacheChange
from leadline.protocol.events import EventBatch, encode_batch, encode_snapshot
from leadline.protocol.load import LoadReport, decode_report, encode_report
from leadline.protocol.wire import WireError

__all__ = ["Identity", "Publisher", "PublisherCounts", "Timing", "load_report"]


@dataclass(slots=True, frozen=True)
class Identity:
    """The fields that stay the same while the engine runs."""

    pod: str
    address: str
    """host:port of the HTTP API, as gateways reach it."""
    epoch: str
    model: str
    """Model id as the prefix chain's namespace has it."""
    revision: str
    served_names: tuple[str, ...]
    block_size: int
    max_model_len: int
    max_concurrent_requests: int = 0
    tokenizer: str = ""
    """Digest of the tokenizer bundle."""
    task: str = "generate"


def load_report(identity: Identity, stats: SchedulerStats, speeds: Speeds, *, draining: bool) -> LoadReport:
    """The heartbeat of this moment."""
    return LoadReport(
        pod=identity.pod,
        address=identity.address,
        epoch=identity.epoch,
        time=time.time(),
        model=identity.model,
        revision=identity.revision,
        tokenizer=identity.tokenizer,
        task=identity.task,
        served_names=list(identity.served_names),
        block_size=identity.block_size,
        max_model_len=identity.max_model_len,
        max_concurrent_requests=identity.max_concurrent_requests,
        running=stats.running,
        waiting=stats.waiting,
        queued_prefill_tokens=stats.queued_prefill_tokens,
        free_blocks=stats.blocks_free + stats.blocks_cached,
        total_blocks=stats.blocks_total,
        prefill_tokens_per_second=speeds.prefill_tokens_per_second,
        decode_step_seconds=speeds.decode_step_seconds,
        draining=draining,
    )


logger = logging.getLogger("leadline.engine.publisher")

FIELD = b"b"
"""The one field of a stream entry: a msgpack EventBatch."""


@dataclass(slots=True, frozen=True)
class Timing:
    """Seconds, but for the stream's length in entries."""

    batch_seconds: float = 0.025
    heartbeat_seconds: float = 1.0
    snapshot_seconds: float = 5.0
    """And one more for each million bytes, so that a large snapshot does not fill the line."""
    snapshot_ttl: float = 120.0
    timeout: float = 2.0
    """Of one command."""
    max_backoff: float = 5.0
    stream_length: int = 100_000


@dataclass(slots=True)
class PublisherCounts:
    """For metrics."""

    batches: int = 0
    snapshots: int = 0
    heartbeats: int = 0
    failures: int = 0
    connected: bool = False


class Publisher:
    """Create, feed with `changed` from then on, `start` once the engine can report, `stop` at the end."""

    def __init__(self, settings: PublishSettings, epoch: str, timing: Timing | None = None) -> None:
        """Raises ConfigError if the package redis is missing or the URL cannot be read."""
        self.settings = settings
        self.timing = timing or Timing()
        self.counts = PublisherCounts()
        self._log = CacheLog(epoch)
        self._redis = _client(settings, self.timing.timeout)
        self._report: Callable[[], LoadReport] | None = None
        self._unsent: deque[EventBatch] = deque()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._first_round = asyncio.Event()
        self._stream_id: str | None = None
        """Where the stream stood when it last held all of our batches; None: to be asked."""
        self._snapshot_seq: int | None = None
        """Of the snapshot in Redis; None: there is none that we know of."""
        self._snapshot_size = 0
        self._failed = False
        self._next_batch = self._next_heartbeat = self._next_snapshot = 0.0
        self._stopping = False

    @property
    def epoch(self) -> str:
        return self._log.epoch

    @property
    def num_blocks(self) -> int:
        """Blocks that the pod holds now."""
        return len(self._log.held)

    def changed(self, change: CacheChange) -> None:
        """The core's prefix index has changed. Never blocks."""
        self._log.apply(change)
        self._news.set()

    def poke(self) -> None:
        """Send a heartbeat at once: something that gateways should know has changed."""
        self._next_heartbeat = 0.0
        self._news.set()

    async def start(self, report: Callable[[], LoadReport], patience: float = 1.0) -> bool:
        """Begin to publish. Waits up to `patience` seconds for the first round, so that gateways know the new
        epoch before they learn that the pod is ready (P19); returns whether it went through."""
        self._report = report
        self._stopping = False
        self._task = asyncio.create_task(self._run(), name="publisher")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._first_round.wait(), patience)
        return self._first_round.is_set()

    async def stop(self, patience: float = 1.0) -> None:
        """Stop, and take the pod off the list if Redis lets us within `patience` seconds. May be called
        twice.

        redis-py sends within `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that comes
        in the moment that the sending ends; each one may be, so the loop looks at a flag as well."""
        task, self._task = self._task, None
        self._stopping = True
        if task is not None:
            while not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=0.1)
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._sign_off(), patience)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._redis.aclose(), patience)

    # -- the task --------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff = 0.1
        while not self._stopping:
            try:
                await self._round()
            except Exception as error:
                self._note_failure(error)
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                backoff = min(backoff * 2, self.timing.max_backoff)
                continue
            backoff = 0.1
            self._note_success()
            await self._wait()

    async def _round(self) -> None:
        """Everything that is due. The snapshot goes before the heartbeat: a gateway that learns about the pod
        finds it."""
        now = time.monotonic()
        if self._log.pending or self._unsent:
            await self._send_batches()
            self._next_batch = now + self.timing.batch_seconds
        heartbeat = now >= self._next_heartbeat
        if heartbeat and self._snapshot_seq is not None:
            ttl = int(self.timing.snapshot_ttl * 1000)
            if not await self._redis.pexpire(self._snapshot_key, ttl):
                self._forget_server()
        if self._snapshot_seq is None or (self._stale_snapshot and now >= self._next_snapshot):
            await self._send_snapshot()
        if heartbeat:
            await self._send_heartbeat()
            self._next_heartbeat = now + self.timing.heartbeat_seconds

    async def _wait(self) -> None:
        """Wait until something is due; changes are due `batch_seconds` after the last batch."""
        due = self._next_heartbeat
        if self._stale_snapshot:
            due = min(due, self._next_snapshot)
        self._news.clear()
        if not self._log.pending:
            # Not wait_for: before Python 3.12 it forgets a cancellation that comes together with a change.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - time.monotonic())):
                    await self._news.wait()
        if self._log.pending:
            await asyncio.sleep(max(0.0, self._next_batch - time.monotonic()))

    # -- commands --------------------------------------------------------------------------------------------

    @property
    def _snapshot_key(self) -> str:
        return self.settings.keys.snapshot(self.settings.pod)

    @property
    def _stale_snapshot(self) -> bool:
        return self._snapshot_seq != self._log.seq

    async def _send_batches(self) -> None:
        """What an earlier round could not send, then what has come up since; no more is cut before that is
        gone, so that an outage leaves one net change behind and not one for each attempt."""
        await self._drain()
        self._unsent.extend(self._log.cut())
        await self._drain()

    async def _drain(self) -> None:
        while self._unsent:
            stream_id = await self._redis.xadd(
                self.settings.keys.events,
                {FIELD: encode_batch(self._unsent[0])},
                maxlen=self.timing.stream_length,
                approximate=True,
            )
            self._stream_id = _text(stream_id)
            self._unsent.popleft()
            self.counts.batches += 1

    async def _send_snapshot(self) -> None:
        if self._stream_id is None:
            last = await self._redis.xrevrange(self.settings.keys.events, count=1)
            self._stream_id = _text(last[0][0]) if last else "0-0"
        # Changes may have come in while we waited: they are cut, and sent after it. `_unsent` was empty.
        self._unsent.extend(self._log.cut())
        snapshot = self._log.snapshot(self._stream_id)
        data = encode_snapshot(snapshot)
        await self._redis.set(self._snapshot_key, data, px=int(self.timing.snapshot_ttl * 1000))
        self._snapshot_seq, self._snapshot_size = snapshot.seq, len(data)
        self._next_snapshot = time.monotonic() + self.timing.snapshot_seconds + len(data) / 1e6
        self.counts.snapshots += 1
        await self._drain()

    async def _send_heartbeat(self) -> None:
        assert self._report is not None
        report = msgspec.structs.replace(self._report(), cache_seq=self._log.seq)
        await self._redis.hset(self.settings.keys.pods, self.settings.pod, encode_report(report))
        self.counts.heartbeats += 1

    async def _sign_off(self) -> None:
        """Delete the heartbeat, unless a new process of the pod has written its own already."""
        pods, pod = self.settings.keys.pods, self.settings.pod
        report = await self._redis.hget(pods, pod)
        with contextlib.suppress(WireError):
            if report is None or decode_report(report).epoch != self.epoch:
                return
        await self._redis.hdel(pods, pod)
        await self._redis.delete(self._snapshot_key)

    # -- failures --------------------------------------------------------------------------------------------

    def _forget_server(self) -> None:
        """It may be another one, or empty: nothing we wrote is known to be there."""
        self._snapshot_seq = None
        self._stream_id = None

    def _note_failure(self, error: Exception) -> None:
        self.counts.failures += 1
        self.counts.connected = False
        self._forget_server()
        self._next_heartbeat = 0.0
        if not self._failed:
            self._failed = True
            logger.warning(
                "cannot publish to Redis at %s: %s: %s; serving on and trying again",
                redacted(self.settings.redis_url),
                type(error).__name__,
                error,
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )

    def _note_success(self) -> None:
        self.counts.connected = True
        self._first_round.set()
        if self._failed:
            self._failed = False
            logger.info("publishing to Redis at %s again", redacted(self.settings.redis_url))


def _client(settings: PublishSettings, timeout: float) -> Any:
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.credentials import CredentialProvider
    except ImportError:
        raise ConfigError("redis_url needs the package redis: pip install 'redis[hiredis]'") from None
    try:
        options: dict[str, Any] = {
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry": Retry(NoBackoff(), 0),  # the task retries, and knows what must be sent again
            "protocol": 2,
        }
        if (folder := settings.credentials) is not None:

            class Files(CredentialProvider):
                """Read at each connection: the password may have changed since the last one."""

                def get_credentials(self) -> tuple[str, str]:
                    username, password = ((folder / name).read_text() for name in ("username", "password"))
                    return username or "default", password

                async def get_credentials_async(self) -> tuple[str, str]:
                    return self.get_credentials()

            options["credential_provider"] = Files()
        return Redis.from_url(settings.redis_url, **options)
    except ValueError:
        raise ConfigError(f"redis_url cannot be read: {redacted(settings.redis_url)}") from None


def _text(stream_id: bytes | str) -> str:
    return stream_id.decode() if isinstance(stream_id, bytes) else stream_id
