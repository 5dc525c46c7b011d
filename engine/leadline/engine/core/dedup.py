"""Prefixes that are being computed right now, and who waits for them instead of computing them again.

A running sequence *owns* the hashes of the prompt blocks it has yet to compute. Another sequence whose next
missing block is owned is parked on it: out of the policy's queue, so that it blocks nobody, and back in the
queue as soon as the block is indexed or the owner is gone.

    owner     | computed | owned: h4 h5 h6 h7 |
    waiter    |  hits    | needs: h4 h5 h6 h9 |     parked on h6, the last block it shares with the owner
"""

from __future__ import annotations

from collections.abc import Callable

from leadline.engine.core.sequence import Sequence

__all__ = ["PrefixDedup"]


class PrefixDedup:
    """Owners of hashes and parked sequences; `wake` puts a sequence back in the queue."""

    def __init__(self, wake: Callable[[Sequence], None]) -> None:
        self._wake = wake
        self._owner: dict[bytes, Sequence] = {}
        self._parked: dict[bytes, dict[Sequence, None]] = {}
        self.num_parked = 0

    def own(self, seq: Sequence, first: int, end: int) -> None:
        """`seq` is going to compute blocks first .. end - 1; what another one owns stays with that one."""
        for position in range(first, end):
            self._owner.setdefault(seq.hashes[position], seq)

    def computed(self, block_hash: bytes) -> None:
        """The block is indexed: nobody owns its hash any more, and whoever waited for it may go on."""
        if self._owner.pop(block_hash, None) is not None:
            self._release(block_hash)

    def disown(self, seq: Sequence, first: int, end: int) -> None:
        """`seq` will not compute blocks first .. end - 1 after all."""
        for position in range(first, end):
            block_hash = seq.hashes[position]
            if self._owner.get(block_hash) is seq:
                del self._owner[block_hash]
                self._release(block_hash)

    def park(self, seq: Sequence, first: int, end: int) -> bool:
        """Park `seq`, whose first missing block is `first`, if that is owned; blocks from `end` on are of no
        use to it.

        False if it is not owned.
        """
        if first >= end:
            return False
        hashes = seq.hashes
        owner = self._owner.get(hashes[first])
        if owner is None:
            return False
        last = first
        while last + 1 < end and self._owner.get(hashes[last + 1]) is owner:
            last += 1
        seq.waiting_for = hashes[last]
        self._parked.setdefault(hashes[last], {})[seq] = None
        self.num_parked += 1
        return True

    def unpark(self, seq: Sequence) -> None:
        """`seq`, which is parked, leaves for another reason (abort, timeout)."""
        assert seq.waiting_for is not None
        waiters = self._parked[seq.waiting_for]
        del waiters[seq]
        if not waiters:
            del self._parked[seq.waiting_for]
        seq.waiting_for = None
        self.num_parked -= 1

    def _release(self, block_hash: bytes) -> None:
        for seq in self._parked.pop(block_hash, ()):
            seq.waiting_for = None
            self.num_parked -= 1
            self._wake(seq)

    @property
    def is_idle(self) -> bool:
        """Nothing owned, nobody parked: true whenever no sequence is being prefilled."""
        return not self._owner and not self._parked and not self.num_parked
