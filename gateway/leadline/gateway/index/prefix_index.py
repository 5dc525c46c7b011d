"""Which pods hold which KV blocks, for one service: the gateway's own copy of every pod's prefix cache.

Owns the map hash → set of pods. No I/O; the reader of the events calls it (see stream.py).

Every generation of a pod's cache, from one `replace_pod`, `clear` or `drop` to the next, has a slot number of
its own, one bit in the sets of pod_sets.py. Forgetting a generation is therefore one entry cleared in
`_live`, however many blocks it held; its bits are swept out of the table a few thousand slots at a time by
later calls, and only then is the slot number given out again:

    replace_pod(A, e1)          restart: replace_pod(A, e2)             sweep has passed
    slot 0 = A live             slot 0 retired, slot 1 = A live         slot 0 free again
    block → {0}                 block → {0} & live = {}                 block deleted

Invariants: a pod is seen through exactly one live slot; a retired slot is never live again before no set has
it; blocks(pod) is the number of table entries whose set has the pod's live slot. Chain hashes name whole
prefixes, so a pod's match is the longest run of blocks from the first; blocks of a pod behind a missing one
count for nothing.

Cost: about 15 to 30 bytes for each distinct block and nothing more for each further pod that holds it, plus
about (pods / 8 + 60) bytes for each distinct set of pods. benchmarks/index_memory.py measures it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from leadline.gateway.index.pod_sets import PodSets, unpack
from leadline.gateway.index.table import HashTable, IntArray, SetIds, U64Array

__all__ = ["Hashes", "IndexStats", "PrefixIndex"]

Hashes = Sequence[int] | U64Array
"""64-bit block hashes (`protocol.chain.short`), as integers or as a uint64 array of one dimension."""

LOAD_CHUNK = 4_096
SWEEP_ON_WRITE = 8_192


@dataclass(slots=True)
class _Generation:
    """One generation of a pod's cache: an epoch, or the part of it since the cache was last cleared."""

    slot: int
    epoch: str
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class IndexStats:
    """For metrics. `entries` counts block-pod pairs, `blocks` distinct blocks (some still to be swept)."""

    pods: int
    entries: int
    blocks: int
    pod_sets: int
    bytes: int


class PrefixIndex:
    """hash → pods in batches. Calls for an unknown pod or another epoch change nothing and return 0."""

    __slots__ = (
        "_cursor",
        "_free_slots",
        "_generations",
        "_live",
        "_next_slot",
        "_retired",
        "_sets",
        "_sweeping",
        "_table",
    )

    def __init__(self, seed: int | None = None) -> None:
        self._table = HashTable(seed)
        self._sets = PodSets(seed)
        self._generations: dict[str, _Generation] = {}
        self._live: list[str | None] = []  # slot → pod while its generation lasts
        self._next_slot = 0
        self._free_slots: list[int] = []
        self._retired: list[int] = []
        self._sweeping: list[int] = []
        self._cursor = 0

    def replace_pod(self, pod: str, epoch: str, hashes: Hashes) -> None:
        """The pod holds exactly these blocks, in this epoch. Everything known about it before is dropped."""
        for _ in self.load_pod(pod, epoch, hashes, chunk=1 << 62):
            pass

    def load_pod(self, pod: str, epoch: str, hashes: Hashes, chunk: int = LOAD_CHUNK) -> Iterator[None]:
        """`replace_pod` in steps of `chunk` blocks, so that an event loop can breathe between them.

        The old blocks are matched until the last step. Closing the iterator before that leaves them in place.
        """
        fresh = _Generation(self._new_slot(), epoch)
        done = False
        try:
            blocks = _as_array(hashes)
            for start in range(0, blocks.size, chunk):
                self._add(fresh, blocks[start : start + chunk])
                yield
            done = True
        finally:
            if not done:
                self._retired.append(fresh.slot)
        self._begin(pod, fresh)

    def store(self, pod: str, epoch: str, hashes: Hashes) -> int:
        """The pod has gained blocks. Returns how many it was not known to hold."""
        generation = self._current(pod, epoch)
        if generation is None:
            return 0
        self.sweep(SWEEP_ON_WRITE)
        return self._add(generation, _as_array(hashes))

    def remove(self, pod: str, epoch: str, hashes: Hashes) -> int:
        """The pod has lost blocks. Returns how many it was known to hold."""
        generation = self._current(pod, epoch)
        if generation is None:
            return 0
        self.sweep(SWEEP_ON_WRITE)
        slots = self._table.find(_as_array(hashes))
        slots = np.unique(slots[slots >= 0])
        old = self._table.get(slots)
        held = self._sets.holds(old, generation.slot)
        self._move(slots[held], old[held], generation.slot)
        removed = int(held.sum())
        generation.blocks -= removed
        return removed

    def clear(self, pod: str, epoch: str) -> bool:
        """The pod has lost all its blocks, and continues in the same epoch."""
        if self._current(pod, epoch) is None:
            return False
        self._begin(pod, _Generation(self._new_slot(), epoch))
        return True

    def drop(self, pod: str) -> bool:
        """The pod is gone."""
        generation = self._generations.pop(pod, None)
        if generation is None:
            return False
        self._live[generation.slot] = None
        self._retired.append(generation.slot)
        return True

    def match(self, hashes: Hashes) -> dict[str, int]:
        """Leading blocks of the chain that each pod holds; pods that hold not even the first are left out."""
        blocks = _as_array(hashes)
        if not blocks.size or not self._generations:
            return {}
        slots = self._table.find(blocks)
        absent = slots < 0
        length = int(absent.argmax()) if absent.any() else blocks.size
        if not length:
            return {}
        ids = self._table.get(slots[:length])
        starts = np.concatenate(([0], np.flatnonzero(ids[1:] != ids[:-1]) + 1))
        # Row r: the pods that hold every block up to the end of run r; rows only ever lose members.
        holders = np.bitwise_and.accumulate(self._sets.masks.take(ids[starts], axis=0), axis=0)
        lost = holders.copy()
        lost[:-1] &= ~holders[1:]
        depths = np.append(starts[1:], length)
        rows = np.flatnonzero(lost.any(axis=1))
        row, slot = np.nonzero(unpack(lost[rows]))
        live = self._live
        out: dict[str, int] = {}
        for number, depth in zip(slot.tolist(), depths[rows[row]].tolist(), strict=True):
            pod = live[number]
            if pod is not None:
                out[pod] = depth
        return out

    def sweep(self, budget: int = 16_384) -> bool:
        """Clear forgotten pods out of up to `budget` slots of the table. Returns whether there is more to do.

        `store` and `remove` sweep a little each; call this when idle (or never).
        """
        if not self._sweeping:
            if not self._retired:
                return False
            self._sweeping, self._retired, self._cursor = self._retired, [], 0
        mask = np.zeros(self._sets.words, dtype=np.uint64)
        for slot in self._sweeping:
            mask[slot >> 6] |= np.uint64(1 << (slot & 63))
        # Entries in front of the cursor hold none of these slots: nothing stores them any more, and a split
        # only copies entries to the end of the table.
        stop = min(self._cursor + budget, self._table.slots)
        hit = self._cursor + np.flatnonzero(self._sets.touch(self._table.chunk(self._cursor, stop), mask))
        if hit.size:
            before, which, counts = np.unique(self._table.get(hit), return_inverse=True, return_counts=True)
            self._rewrite(hit, before, self._sets.strip(before, mask), which, counts)
        self._cursor = stop
        if stop == self._table.slots:
            self._free_slots.extend(self._sweeping)
            self._sweeping = []
        return bool(self._sweeping or self._retired)

    def pods(self) -> dict[str, str]:
        """pod → epoch."""
        return {pod: generation.epoch for pod, generation in self._generations.items()}

    def blocks(self, pod: str) -> int:
        """Blocks the pod is known to hold."""
        generation = self._generations.get(pod)
        return generation.blocks if generation else 0

    def stats(self) -> IndexStats:
        return IndexStats(
            pods=len(self._generations),
            entries=sum(generation.blocks for generation in self._generations.values()),
            blocks=len(self._table),
            pod_sets=len(self._sets),
            bytes=self._table.nbytes + self._sets.nbytes,
        )

    def _current(self, pod: str, epoch: str) -> _Generation | None:
        generation = self._generations.get(pod)
        return generation if generation is not None and generation.epoch == epoch else None

    def _new_slot(self) -> int:
        self.sweep(SWEEP_ON_WRITE)
        if self._free_slots:
            return self._free_slots.pop()
        slot = self._next_slot
        self._next_slot += 1
        self._sets.reserve(slot)
        self._live.append(None)
        return slot

    def _begin(self, pod: str, generation: _Generation) -> None:
        self.drop(pod)
        self._generations[pod] = generation
        self._live[generation.slot] = pod

    def _add(self, generation: _Generation, blocks: U64Array) -> int:
        slots = self._table.find(blocks)
        present = np.unique(slots[slots >= 0])
        old = self._table.get(present)
        gained = ~self._sets.holds(old, generation.slot)
        self._move(present[gained], old[gained], generation.slot)
        added = int(gained.sum())

        missing = np.unique(blocks[slots < 0])
        if missing.size:
            empty = np.zeros(1, dtype=np.uint32)
            alone = self._sets.toggle(empty, generation.slot)
            self._sets.move(empty, alone, np.array([missing.size], dtype=np.int32))
            self._table.insert(missing, np.full(missing.size, alone[0], dtype=np.uint32))
            added += missing.size
        generation.blocks += added
        return added

    def _move(self, slots: IntArray, old: SetIds, pod_slot: int) -> None:
        """Toggle the pod in the entries at distinct table slots, which hold the sets `old`."""
        if not slots.size:
            return
        before, which, counts = np.unique(old, return_inverse=True, return_counts=True)
        self._rewrite(slots, before, self._sets.toggle(before, pod_slot), which, counts)

    def _rewrite(
        self, slots: IntArray, before: SetIds, after: SetIds, which: IntArray, counts: IntArray
    ) -> None:
        """Set `before[which[i]]` in table slot `slots[i]` becomes `after[which[i]]`."""
        self._sets.move(before, after, counts.astype(np.int32))
        ids = after[which]
        self._table.put(slots, ids)
        gone = slots[ids == 0]
        if gone.size:
            self._table.delete(gone)


def _as_array(hashes: Hashes) -> U64Array:
    return np.asarray(hashes, dtype=np.uint64)
