"""The core process's part: what changed in the prefix index since the last message.

Fed by the block pool in the step loop, so one dict operation an event and nothing that could block. Only the
net change is kept: a block stored and evicted between two messages never existed for anyone else. That also
bounds the memory: at most every hash of the old index removed and every hash of the new one stored.
"""

from __future__ import annotations

from array import array

from leadline.engine.wire import CacheChange
from leadline.protocol.chain import short

__all__ = ["CacheChanges"]


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
