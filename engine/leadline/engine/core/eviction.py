"""Which cached, unreferenced block is given up first.

An eviction policy holds exactly the blocks that are cached (their hash is in the prefix index) and that no
sequence references. The block pool tells it when a block joins or leaves that set, and asks it for a victim
when the free list is empty. It owns nothing else: no hashes, no reference counts.

Blocks of one table are added deepest first:

    table of a sequence    [ b0 | b1 | b2 | b3 ]        released as  b3, b2, b1, b0
                             ^ root          ^ deepest

A block can only be hit when all blocks before it are hit, so a policy must give up a child before its parent.
Both policies here do, because a parent is always added after its children and never with a smaller
`chain_length`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol, runtime_checkable

__all__ = ["EvictionPolicy", "LRUEviction", "LengthAwareEviction"]


@runtime_checkable
class EvictionPolicy(Protocol):
    """Built without arguments; named by an entry point in the group `leadline.eviction_policies`."""

    def add(self, block: int, chain_length: int) -> None:
        """`block` is cached and no longer referenced. It is not held now.

        chain_length: blocks of the longest block table it was part of; a parent's is never less than its
        child's.
        """

    def remove(self, block: int) -> None:
        """`block`, which is held, is referenced again or no longer cached."""

    def pop(self) -> int:
        """Choose a held block, forget it and return it. Called only while `len(self) > 0`."""

    def clear(self) -> None:
        """Forget everything: the cache was reset."""

    def __len__(self) -> int:
        """Blocks held."""


class LRUEviction:
    """Least recently used first; of one chain, the deepest block first. O(1) for every operation."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int, chain_length: int) -> None:
        self._order[block] = None

    def remove(self, block: int) -> None:
        del self._order[block]

    def pop(self) -> int:
        return self._order.popitem(last=False)[0]

    def clear(self) -> None:
        self._order.clear()

    def __len__(self) -> int:
        return len(self._order)


class LengthAwareEviction:
    """LRU in which a block of a long chain counts as used later than it was.

    A long prefix costs more to compute again than a short one, and it usually is a conversation or a document
    that comes back, where short prompts are often asked once. The rule:

        keep(block) = tick at which it was let go + weight * 2 ** bucket
        bucket      = bit length of its chain length

    and the smallest `keep` goes first. Ticks count blocks let go, so a chain of n blocks outlives roughly
    weight * n newer blocks of short chains, then ages out like everything else: no chain stays forever.

    Within one bucket `keep` only grows with the tick, so a bucket is a queue and only the heads of the queues
    are compared: O(1) to add and to remove, O(log2 of the longest chain) to pop. A parent has the later tick
    and no smaller bucket, so it never goes before its child.
    """

    def __init__(self, weight: float = 1.0) -> None:
        self._weight = weight
        self._tick = 0
        self._queues: dict[int, OrderedDict[int, int]] = {}  # bucket → block → tick
        self._bucket: dict[int, int] = {}  # held block → its bucket

    def add(self, block: int, chain_length: int) -> None:
        bucket = chain_length.bit_length()
        self._bucket[block] = bucket
        self._tick += 1
        self._queues.setdefault(bucket, OrderedDict())[block] = self._tick

    def remove(self, block: int) -> None:
        del self._queues[self._bucket.pop(block)][block]

    def pop(self) -> int:
        best, best_keep = -1, float("inf")
        for bucket, queue in self._queues.items():
            if queue:
                keep = next(iter(queue.values())) + self._weight * 2.0**bucket
                if keep < best_keep:
                    best, best_keep = bucket, keep
        block, _ = self._queues[best].popitem(last=False)
        del self._bucket[block]
        return block

    def clear(self) -> None:
        self._queues.clear()
        self._bucket.clear()

    def __len__(self) -> int:
        return len(self._bucket)
