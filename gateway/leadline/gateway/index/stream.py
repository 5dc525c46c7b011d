"""Turns the event stream of one service into calls on an index, and says when a pod's snapshot must be read.

Owns the position in each pod's sequence of batches. Pure: the reader of Redis (or a
test, or a simulation) drives it and does what `reloads()` asks for.

Batches name an epoch, not a pod; heartbeats say which pod lives in which epoch. For each pod:

    pod_seen(new epoch) ──► LOST (holds nothing) ── batch seq 0, `cleared`, or a snapshot ──► IN STEP at n
                             ▲    │ keeps later batches,                                          │
                             │    ▼ asks for a snapshot                   batch n+1: apply        │
                             └────────────────────── batch > n+1: a gap ◄─────────────────────────┘
                                                     batch ≤ n: stale, ignored

    snapshot at seq s:  s < n → older than what is known, ignored
                        else → load it, then apply the kept batches s+1, s+2, …

While LOST the index keeps the pod's last known blocks: a stale guess is better than none, and the gap is
short. A gap that the missing batch fills by itself (reordering) needs no snapshot.

Invariants: an index never sees batches of a pod out of order or twice; of each pod at most `MAX_KEPT` batches
and `MAX_KEPT_BLOCKS` blocks wait for a snapshot (dropping some only means another gap).
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np

from leadline.gateway.index.prefix_index import Hashes
from leadline.protocol.events import CacheSnapshot, EventBatch

__all__ = ["CacheSink", "EventStream", "Outcome"]

MAX_KEPT = 1_024
MAX_KEPT_BLOCKS = 1_000_000


class CacheSink(Protocol):
    """What the stream writes to: ServiceIndex, or a bare PrefixIndex."""

    def load_pod(self, pod: str, epoch: str, hashes: Hashes) -> Iterator[None]: ...
    def store(self, pod: str, epoch: str, hashes: Hashes) -> int: ...
    def remove(self, pod: str, epoch: str, hashes: Hashes) -> int: ...
    def clear(self, pod: str, epoch: str) -> bool: ...
    def drop(self, pod: str) -> bool: ...


class Outcome(Enum):
    """What became of a batch or a snapshot."""

    APPLIED = "applied"
    STALE = "stale"
    """Known already, or older than what is known."""
    UNKNOWN_EPOCH = "unknown epoch"
    """The epoch of an earlier process of a pod, or of a pod that no heartbeat has named."""
    GAP = "gap"
    """Batches before it are missing: kept, and the pod's snapshot must be read."""


@dataclass(slots=True)
class _Position:
    pod: str
    epoch: str
    seq: int = -1
    lost: bool = True
    loading: bool = False
    kept: dict[int, EventBatch] = field(default_factory=dict)
    kept_blocks: int = 0


class EventStream:
    """Positions of all pods of one service."""

    __slots__ = ("_by_epoch", "_by_pod", "_sink", "gaps")

    def __init__(self, sink: CacheSink) -> None:
        self._sink = sink
        self._by_pod: dict[str, _Position] = {}
        self._by_epoch: dict[str, _Position] = {}
        self.gaps = 0
        """Times a pod fell out of step."""

    def pod_seen(self, pod: str, epoch: str) -> bool:
        """A heartbeat. Returns whether the epoch is new: the pod then holds nothing, from this moment on."""
        known = self._by_pod.get(pod)
        if known is not None:
            if known.epoch == epoch:
                return False
            self.pod_gone(pod)
        position = _Position(pod, epoch)
        self._by_pod[pod] = self._by_epoch[epoch] = position
        for _ in self._sink.load_pod(pod, epoch, ()):
            pass
        return True

    def pod_gone(self, pod: str) -> None:
        """The pod is no longer part of the service."""
        position = self._by_pod.pop(pod, None)
        if position is not None:
            if self._by_epoch.get(position.epoch) is position:
                del self._by_epoch[position.epoch]
            self._sink.drop(pod)

    def reloads(self) -> list[str]:
        """Pods whose snapshot must be read and handed to `snapshot` or `load_snapshot`."""
        return [pod for pod, position in self._by_pod.items() if position.lost and not position.loading]

    def distrust(self) -> None:
        """The stream itself was lost (reconnected, flushed, trimmed): ask for every pod's snapshot again."""
        for position in self._by_pod.values():
            self._lose(position)

    def expect(self, pod: str, epoch: str, seq: int) -> bool:
        """Note that a heartbeat names batch `seq`, and that the stream has been read beyond it. Returns
        whether batches are missing; unlike a gap this also finds the loss of a pod's last ones."""
        position = self._by_pod.get(pod)
        if position is None or position.epoch != epoch or position.loading or seq <= position.seq:
            return False
        self._lose(position)
        return True

    def in_step(self, pod: str) -> bool:
        """Whether the index is known to be as the pod's last batch left it."""
        position = self._by_pod.get(pod)
        return position is not None and not position.lost

    def batch(self, batch: EventBatch) -> Outcome:
        """Apply a batch, or find out why not."""
        position = self._by_epoch.get(batch.epoch)
        if position is None:
            return Outcome.UNKNOWN_EPOCH
        if batch.seq <= position.seq or batch.seq in position.kept:
            return Outcome.STALE
        if position.loading or (batch.seq != position.seq + 1 and not batch.cleared):
            if not position.loading:
                self._lose(position)
            self._keep(position, batch)
            return Outcome.GAP
        self._apply(position, batch)
        position.lost = False
        self._replay(position)
        return Outcome.APPLIED

    def snapshot(self, pod: str, snapshot: CacheSnapshot) -> Outcome:
        """Load a snapshot at once, and the kept batches on top of it."""
        steps = self.load_snapshot(pod, snapshot)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome

    def load_snapshot(self, pod: str, snapshot: CacheSnapshot) -> Generator[None, None, Outcome]:
        """`snapshot` in short steps; the caller may do other things between them, even hand in batches.

        The iterator's return value is the Outcome. Closed early, it leaves the pod as it was, asking for a
        snapshot.
        """
        position = self._by_pod.get(pod)
        if position is None or position.epoch != snapshot.epoch:
            return Outcome.UNKNOWN_EPOCH
        if (
            position.loading
            or snapshot.seq < position.seq
            or (snapshot.seq == position.seq and not position.lost)
        ):
            return Outcome.STALE
        position.loading = True
        try:
            blocks = np.frombuffer(snapshot.packed, dtype="<u8").astype(np.uint64, copy=False)
            for _ in self._sink.load_pod(pod, snapshot.epoch, blocks):
                yield
                if self._by_pod.get(pod) is not position:
                    return Outcome.UNKNOWN_EPOCH
        finally:
            position.loading = False
        position.seq = snapshot.seq
        position.lost = False
        for seq in [seq for seq in position.kept if seq <= snapshot.seq]:
            self._forget(position, seq)
        self._replay(position)
        return Outcome.APPLIED

    def _replay(self, position: _Position) -> None:
        """Apply the kept batches that now follow; if some remain, there is a gap in front of them."""
        while (batch := position.kept.get(position.seq + 1)) is not None:
            self._forget(position, batch.seq)
            self._apply(position, batch)
        for seq in [seq for seq in position.kept if seq <= position.seq]:
            self._forget(position, seq)
        if position.kept:
            self._lose(position)

    def _apply(self, position: _Position, batch: EventBatch) -> None:
        pod, epoch = position.pod, position.epoch
        if batch.cleared:
            self._sink.clear(pod, epoch)
        if batch.removed:
            self._sink.remove(pod, epoch, batch.removed)
        if batch.stored:
            self._sink.store(pod, epoch, batch.stored)
        position.seq = batch.seq

    def _lose(self, position: _Position) -> None:
        if not position.lost:
            position.lost = True
            self.gaps += 1

    def _keep(self, position: _Position, batch: EventBatch) -> None:
        position.kept[batch.seq] = batch
        position.kept_blocks += len(batch.stored) + len(batch.removed)
        while len(position.kept) > MAX_KEPT or position.kept_blocks > MAX_KEPT_BLOCKS:
            self._forget(position, min(position.kept))

    def _forget(self, position: _Position, seq: int) -> None:
        batch = position.kept.pop(seq)
        position.kept_blocks -= len(batch.stored) + len(batch.removed)
