"""A real Valkey for tests, pods that publish to it without a model, and a way to wait."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable

from leadline.cli.valkey import EmbeddedValkey
from leadline.engine.core.block_pool import BlockPool
from leadline.engine.core.stats import SchedulerStats, Speeds
from leadline.engine.publisher.log import CacheChanges
from leadline.engine.publisher.publisher import Identity, Publisher, Timing, load_report
from leadline.engine.publisher.settings import PublishSettings, new_epoch
from leadline.protocol.chain import short
from leadline.protocol.keys import ServiceKeys
from leadline.protocol.load import LoadReport

KEYS = ServiceKeys("ns", "llm")
FAST = Timing(
    batch_seconds=0.005,
    heartbeat_seconds=0.1,
    snapshot_seconds=0.2,
    snapshot_ttl=30,
    timeout=0.5,
    max_backoff=0.3,
)


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen within {seconds} s")
        await asyncio.sleep(0.005)


class PoolPod:
    """A real block pool and a real publisher. What an engine does to its pool, `work` does at random."""

    def __init__(
        self, url: str, name: str = "pod-a", *, blocks: int = 48, seed: int = 0, timing: Timing = FAST
    ):
        self.name = name
        self.address = f"{name}:8000"
        self.draining = False
        self._changes = CacheChanges()
        self.pool = BlockPool(blocks, listener=self._changes)
        self.publisher = Publisher(PublishSettings(url, KEYS, name, self.address), new_epoch(), timing)
        self._random = random.Random(seed)
        self._tables: list[list[int]] = []

    async def start(self, patience: float = 5.0) -> bool:
        return await self.publisher.start(self.report, patience)

    async def stop(self) -> None:
        await self.publisher.stop()

    def report(self) -> LoadReport:
        pool = self.pool
        stats = SchedulerStats(
            running=len(self._tables),
            prefilling=0,
            waiting=0,
            waiting_by_class={},
            parked=0,
            queued_prefill_tokens=0,
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_used=pool.num_used,
            blocks_cached=pool.num_cached,
            steps_in_flight=0,
            steps_total=0,
            requests_total=0,
            preemptions_total=0,
            prefix_query_tokens_total=0,
            prefix_hit_tokens_total=0,
            generated_tokens_total=0,
            timeouts_total=0,
        )
        identity = Identity(self.name, self.address, self.publisher.epoch, "m", "r", ("m",), 16, 512)
        return load_report(identity, stats, Speeds(1000.0, 0.01), draining=self.draining)

    def hashes(self) -> set[int]:
        """What the pool holds: the truth that gateways are measured by."""
        return {short(block_hash) for block_hash in self.pool.hashes()}

    def store(self, *numbers: int) -> None:
        """Compute these blocks; they stay cached until evicted."""
        for number in numbers:
            table = self.pool.allocate(1)
            self.pool.commit(table[0], block_hash(number))
            self.pool.release(table)
        self.step()

    def work(self, operations: int = 1, universe: int = 200) -> None:
        """Random requests come and go: blocks are hit, computed, evicted; now and then the cache is reset."""
        for _ in range(operations):
            pool, rng = self.pool, self._random
            if rng.random() < 0.02:
                pool.reset()
            elif self._tables and (rng.random() < 0.45 or pool.num_available < 4):
                pool.release(self._tables.pop(rng.randrange(len(self._tables))))
            else:
                table: list[int] = []
                first = rng.randrange(universe)
                for number in range(first, first + rng.randrange(1, 4)):
                    found = pool.match([block_hash(number)], 1)
                    if found:
                        pool.acquire(found)
                        table += found
                    elif pool.num_available:
                        table += pool.allocate(1)
                        pool.commit(table[-1], block_hash(number))
                self._tables.append(table)
            if rng.random() < 0.5:
                self.step()
        self.step()

    def step(self) -> None:
        """End of a step: what the core process sends to the API process."""
        change = self._changes.take()
        if change is not None:
            self.publisher.changed(change)


def block_hash(number: int) -> bytes:
    return random.Random(number).randbytes(16)


@contextlib.asynccontextmanager
async def pods(valkey: EmbeddedValkey, *names: str, timing: Timing = FAST) -> AsyncIterator[list[PoolPod]]:
    """Pods that publish already."""
    made = [PoolPod(valkey.url, name, seed=number, timing=timing) for number, name in enumerate(names)]
    try:
        for pod in made:
            assert await pod.start()
        yield made
    finally:
        for pod in made:
            await pod.stop()
