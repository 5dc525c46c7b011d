"""The prefix index as gateways see it: its changes in the core process, and its mirror in the API process.

`CacheChanges` is fed by the block pool in the step loop: one dict operation an event, and nothing that could
block. Only the net change is kept, because a block that is stored and evicted between two messages never
existed for any reader. That bounds its memory: at most every hash of the old index removed and every hash of
the new one stored. `CacheLog` makes numbered batches and snapshots of the changes; pure.
"""

from __future__ import annotations

from array import array

from leadline.engine.wire import CacheChange
from leadline.protocol.chain import short
from leadline.protocol.events import CacheSnapshot, EventBatch

__all__ = ["MAX_BATCH_HASHES", "CacheChanges", "CacheLog"]


class CacheChanges:
    """A `PoolListener` that remembers net changes until `take`."""

    __slots__ = ("_cleared", "_removed", "_stored")

    def __init__(self) -> None:
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        self._cleared = False

    def stored(self, block_hash: bytes) -> None:
        name = short(block_hash)
        if name in self._removed:
            del self._removed[name]
        else:
            self._stored[name] = None

    def removed(self, block_hash: bytes) -> None:
        name = short(block_hash)
        if name in self._stored:
            del self._stored[name]
        else:
            self._removed[name] = None

    def cleared(self) -> None:
        self._stored.clear()
        self._removed.clear()
        self._cleared = True

    def take(self) -> CacheChange | None:
        """The change since the last call; None if there is none."""
        if not (self._stored or self._removed or self._cleared):
            return None
        change = CacheChange(
            stored=array("Q", self._stored).tobytes(),
            removed=array("Q", self._removed).tobytes(),
            cleared=self._cleared,
        )
        self._stored.clear()
        self._removed.clear()
        self._cleared = False
        return change


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
