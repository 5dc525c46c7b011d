"""A compact map from 64-bit hashes to 32-bit numbers that is looked up, filled and emptied in batches.

Owns two numpy arrays; knows no pods and no blocks.

The layout is extendible hashing over segments of two-choice buckets of sixteen slots:

    mixed key (64 bits)
    +-- depth bits --+------------------ ... ------+-- 8 bits --+-- 8 bits --+
    | directory index|                             |  bucket 2  |  bucket 1  |
    +----------------+-----------------------------+------------+------------+
            |
            v
    directory[...] -> segment -> 256 buckets x 16 slots      keys: uint64, values: uint32

A key lives in one of its two buckets, so a look-up is one gather of 32 keys and no probing loop, however full
the table is. When both buckets of a new key are full, its segment splits by the next key bit. The bucket
numbers do not depend on the segment, so a split copies 4,096 slots to the same places of a new segment and
blanks the half that does not belong on either side: tens of microseconds, however large the table is. Growth
therefore never rehashes the whole table. The arrays grow by `GROW_SEGMENTS` segments at a time through
`ndarray.resize`, which is realloc (mremap on Linux: pages move, bytes do not).

Invariants: a slot is free exactly when its key is 0 (a mixed key of 0 is folded onto 1, probability 2^-64); a
key is present at most once; no view of the arrays outlives a call, because resize may move them.

12 bytes a slot. Segments split at about 80 % full, so 15 to 30 bytes a key. The table does not shrink: freed
slots are reused by later keys.
"""

import os

import numpy as np
import numpy.typing as npt

__all__ = ["HashTable", "IntArray", "SetIds", "U64Array"]

U64Array = npt.NDArray[np.uint64]
IntArray = npt.NDArray[np.int64]
SetIds = npt.NDArray[np.uint32]

SLOTS = 16
BUCKET_BITS = 8
BUCKETS = 1 << BUCKET_BITS
SEGMENT_SLOTS = BUCKETS * SLOTS
GROW_SEGMENTS = 32
MAX_DEPTH = 24

_ODD = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_ONE = np.uint64(1)
_BUCKET_MASK = np.uint64(BUCKETS - 1)
_BUCKET_SHIFT = np.uint64(BUCKET_BITS)


class HashTable:
    """uint64 → uint32 in batches. `seed` is secret by default, so that no client can aim keys at one
    bucket."""

    __slots__ = (
        "_depth",
        "_directory",
        "_keys",
        "_prefixes",
        "_seed",
        "_segment_depths",
        "_segments",
        "_vals",
        "size",
    )

    def __init__(self, seed: int | None = None) -> None:
        self._seed = np.uint64(int.from_bytes(os.urandom(8), "little") if seed is None else seed)
        self._depth = 1
        self._directory: npt.NDArray[np.int64] = np.arange(2, dtype=np.int64)
        self._segment_depths = [1, 1]
        self._prefixes = [0, 1]
        self._segments = 2
        self._keys: U64Array = np.zeros((2 * BUCKETS, SLOTS), dtype=np.uint64)
        self._vals: SetIds = np.zeros((2 * BUCKETS, SLOTS), dtype=np.uint32)
        self.size = 0

    def __len__(self) -> int:
        return self.size

    @property
    def slots(self) -> int:
        """Slots in use or free, in segments that exist. Slot numbers are below this."""
        return self._segments * SEGMENT_SLOTS

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, spare segments included."""
        return self._keys.nbytes + self._vals.nbytes + self._directory.nbytes

    def find(self, hashes: U64Array) -> IntArray:
        """Slot number of each hash, −1 where absent. Shape (n,) → (n,). Duplicates are fine."""
        return self._find(self._mix(hashes))

    def get(self, slots: IntArray) -> SetIds:
        """Values at slots that `find` gave (all ≥ 0)."""
        return self._vals.reshape(-1).take(slots)

    def put(self, slots: IntArray, values: SetIds) -> None:
        """Overwrite the values at slots that `find` gave (all ≥ 0)."""
        self._vals.reshape(-1)[slots] = values

    def chunk(self, start: int, stop: int) -> SetIds:
        """A copy of the values of slots start..stop; free slots hold 0."""
        return self._vals.reshape(-1)[start:stop].copy()

    def insert(self, hashes: U64Array, values: SetIds) -> None:
        """Add hashes that are absent and distinct. Raises OverflowError when a segment has split 24 times."""
        mixed = self._mix(hashes)
        while mixed.size:
            pairs = self._candidates(mixed)
            fill = (self._keys.take(pairs, axis=0) != 0).sum(axis=2)
            side = fill.argmin(axis=1)
            rows = np.arange(mixed.size)
            bucket, used = pairs[rows, side], fill[rows, side]

            # Several keys of one batch may want the same bucket: the r-th of them takes its r-th free slot.
            order = np.argsort(bucket, kind="stable")
            ranked = bucket[order]
            first = np.empty(ranked.size, dtype=bool)
            first[0] = True
            np.not_equal(ranked[1:], ranked[:-1], out=first[1:])
            starts = np.flatnonzero(first)
            rank = np.arange(ranked.size) - starts[np.cumsum(first) - 1]
            fits = rank < SLOTS - used[order]

            take, rank = order[fits], rank[fits]
            target = bucket[take]
            free_so_far = (self._keys.take(target, axis=0) == 0).cumsum(axis=1)
            slot = target * SLOTS + (free_so_far == (rank + 1)[:, None]).argmax(axis=1)
            self._keys.reshape(-1)[slot] = mixed[take]
            self._vals.reshape(-1)[slot] = values[take]
            self.size += int(take.size)

            left = order[~fits]
            if left.size:
                full = left[used[left] == SLOTS]
                for segment in np.unique(bucket[full] >> BUCKET_BITS):
                    self._split(int(segment))
            mixed, values = mixed[left], values[left]

    def delete(self, slots: IntArray) -> None:
        """Free distinct slots that `find` gave (all ≥ 0)."""
        self._keys.reshape(-1)[slots] = 0
        self._vals.reshape(-1)[slots] = 0
        self.size -= int(slots.size)

    def _mix(self, hashes: U64Array) -> U64Array:
        """A secret bijection of 64 bits, so that comparing mixed keys compares hashes."""
        mixed = (hashes ^ self._seed) * _ODD
        mixed ^= mixed >> _HALF
        mixed[mixed == 0] = _ONE
        return mixed

    def _candidates(self, mixed: U64Array) -> IntArray:
        """Both bucket numbers of each key, shape (n, 2)."""
        base = self._directory.take((mixed >> np.uint64(64 - self._depth)).view(np.int64)) << BUCKET_BITS
        pairs = np.empty((mixed.size, 2), dtype=np.int64)
        pairs[:, 0] = base + (mixed & _BUCKET_MASK).view(np.int64)
        pairs[:, 1] = base + ((mixed >> _BUCKET_SHIFT) & _BUCKET_MASK).view(np.int64)
        return pairs

    def _find(self, mixed: U64Array) -> IntArray:
        pairs = self._candidates(mixed)
        equal = self._keys.take(pairs, axis=0).reshape(-1, 2 * SLOTS) == mixed[:, None]
        column = equal.argmax(axis=1)
        rows = np.arange(mixed.size)
        slots: IntArray = pairs[rows, column // SLOTS] * SLOTS + column % SLOTS
        slots[~equal[rows, column]] = -1
        return slots

    def _split(self, segment: int) -> None:
        depth, prefix = self._segment_depths[segment], self._prefixes[segment]
        if depth == MAX_DEPTH:
            raise OverflowError(f"the hash table cannot hold more: a segment split {MAX_DEPTH} times is full")
        if depth == self._depth:
            self._directory = np.repeat(self._directory, 2)
            self._depth += 1
        new = self._segments
        if (new + 1) * BUCKETS > len(self._keys):
            rows = len(self._keys) + GROW_SEGMENTS * BUCKETS
            self._keys.resize((rows, SLOTS), refcheck=False)
            self._vals.resize((rows, SLOTS), refcheck=False)
        self._segments += 1
        old_rows = slice(segment * BUCKETS, (segment + 1) * BUCKETS)
        new_rows = slice(new * BUCKETS, (new + 1) * BUCKETS)
        keys, vals = self._keys[old_rows], self._vals[old_rows]
        moves = ((keys >> np.uint64(63 - depth)) & _ONE).astype(bool)
        self._keys[new_rows] = np.where(moves, keys, 0)
        self._vals[new_rows] = np.where(moves, vals, 0)
        keys[moves] = 0
        vals[moves] = 0

        self._segment_depths[segment] = depth + 1
        self._segment_depths.append(depth + 1)
        self._prefixes[segment] = prefix * 2
        self._prefixes.append(prefix * 2 + 1)
        width = 1 << (self._depth - depth - 1)
        start = (prefix * 2 + 1) * width
        self._directory[start : start + width] = new
