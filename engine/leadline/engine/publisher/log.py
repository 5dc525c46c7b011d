"""Numbered batches and snapshots of one pod's cache, made of the changes that the core reports. Pure.

    change ──▶ held      what the pod holds now                 ──▶ snapshot: held, true after batch n
          └──▶ pending   net change since batch n was cut       ──▶ cut: batches n+1, n+2, …

`pending` is a net change, so it never outgrows the cache itself however long nobody takes it: at most every
block held at batch n removed and every block held now stored. That is the cap on what an absent Redis can
cost. A batch that was cut keeps its number until it is known to have arrived; sending it twice is harmless,
because readers go by the number.

Invariant: (state after batch n) − pending.removed + pending.stored = held, where "cleared" empties first.
"""

from __future__ import annotations

from array import array

from leadline.engine.wire import CacheChange
from leadline.protocol.events import CacheSnapshot, EventBatch

__all__ = ["MAX_BATCH_HASHES", "CacheLog"]

MAX_BATCH_HASHES = 65_536
"""Of one batch, about 600 kB: a long backlog goes out in pieces that neither Redis nor a reader chokes on."""


class CacheLog:
    """The cache of one pod in one epoch, as its gateways shall see it."""

    __slots__ = ("_cleared", "_removed", "_stored", "epoch", "held", "seq")

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self.seq = -1
        """Number of the last batch cut."""
        self.held: set[int] = set()
        self._stored: set[int] = set()
        self._removed: set[int] = set()
        self._cleared = False

    @property
    def pending(self) -> int:
        """Events that the next `cut` will put into batches."""
        return len(self._stored) + len(self._removed) + self._cleared

    def apply(self, change: CacheChange) -> None:
        """Take in what the core reports."""
        if change.cleared:
            self.held.clear()
            self._stored.clear()
            self._removed.clear()
            self._cleared = True
        removed, stored = _unpack(change.removed), _unpack(change.stored)
        self.held.difference_update(removed)
        self.held.update(stored)
        for name in removed:
            if name in self._stored:
                self._stored.remove(name)
            else:
                self._removed.add(name)
        for name in stored:
            if name in self._removed:
                self._removed.remove(name)
            else:
                self._stored.add(name)

    def cut(self) -> list[EventBatch]:
        """Everything pending as batches with the next numbers; afterwards nothing is pending."""
        batches: list[EventBatch] = []
        removed, stored, cleared = list(self._removed), list(self._stored), self._cleared
        while removed or stored or cleared:
            gone, removed = removed[:MAX_BATCH_HASHES], removed[MAX_BATCH_HASHES:]
            room = MAX_BATCH_HASHES - len(gone)
            new, stored = stored[:room], stored[room:]
            self.seq += 1
            batches.append(
                EventBatch(epoch=self.epoch, seq=self.seq, stored=new, removed=gone, cleared=cleared)
            )
            cleared = False
        self._stored.clear()
        self._removed.clear()
        self._cleared = False
        return batches

    def snapshot(self, stream_id: str) -> CacheSnapshot:
        """All blocks held, true after batch `seq`. `stream_id`: a position in the stream before which no
        later batch stands.

        Raises RuntimeError while something is pending: it would be in the snapshot and in a later batch.
        """
        if self.pending:
            raise RuntimeError(f"{self.pending} events are pending: cut before taking a snapshot")
        return CacheSnapshot(
            epoch=self.epoch, seq=self.seq, stream_id=stream_id, packed=CacheSnapshot.pack(self.held)
        )


def _unpack(data: bytes) -> array[int]:
    values = array("Q")
    values.frombytes(data)
    return values
