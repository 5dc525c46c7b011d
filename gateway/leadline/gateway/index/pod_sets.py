"""Interned sets of pod slots: a block in the index costs one set number, however many pods hold it.

Owns the sets and their reference counts; knows pods only as small slot numbers.

Blocks of one prefix are mostly held by exactly the same pods, so there are far fewer distinct sets than
blocks. A set is a row of bits (`masks`, W words of 64 pods) found by its Zobrist hash, the XOR of one random
number per member: adding or removing a member is one XOR, so whole batches move from set to set without
touching Python objects.

    set number   masks row (W x uint64)    zobrist          refs
        0        000...0                   0                -      the empty set, never counted, never freed
        7        ..1..1..                  z[2]^z[5]        812    812 blocks are held by pods 2 and 5

Invariants: `refs[i]` is the number of index entries that hold number i; a set with no references is freed at
once; two live numbers never have the same members. Two different sets with one Zobrist hash (about 10^-7 at
three million sets) would make the gateway overrate a pod for some blocks: a poorer pick, nothing worse.
"""

import random

import numpy as np
import numpy.typing as npt

from leadline.gateway.index.table import HashTable, SetIds, U64Array

__all__ = ["PodSets", "unpack"]

GROW_ROWS = 16_384
FIRST_WORDS = 4


class PodSets:
    """Reference-counted sets of pod slots. All numbers are uint32; 0 is the empty set."""

    __slots__ = ("_by_hash", "_free", "_pod_keys", "_random", "_refs", "_rows", "_zobrist", "masks", "words")

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()
        self._by_hash = HashTable(seed)
        self.words = FIRST_WORDS
        self.masks: U64Array = np.zeros((64, FIRST_WORDS), dtype=np.uint64)
        self._zobrist: U64Array = np.zeros(64, dtype=np.uint64)
        self._refs: npt.NDArray[np.int32] = np.zeros(64, dtype=np.int32)
        self._free: list[int] = []
        self._rows = 1
        self._pod_keys: U64Array = np.zeros(0, dtype=np.uint64)

    def __len__(self) -> int:
        """Distinct non-empty sets."""
        return len(self._by_hash)

    @property
    def nbytes(self) -> int:
        return (
            self.masks.nbytes
            + self._zobrist.nbytes
            + self._refs.nbytes
            + self._by_hash.nbytes
            + 40 * len(self._free)
        )

    def reserve(self, slot: int) -> None:
        """Make space for a pod slot. Doubles every row, by copying, at 256, 512, … pods."""
        if slot >= self._pod_keys.size:
            fresh = [self._random.getrandbits(64) for _ in range(slot + 1)]
            self._pod_keys = np.append(self._pod_keys, np.array(fresh, dtype=np.uint64))
        words = self.words
        while words * 64 <= slot:
            words *= 2
        if words != self.words:
            wider = np.zeros((len(self.masks), words), dtype=np.uint64)
            wider[:, : self.words] = self.masks
            self.masks, self.words = wider, words

    def holds(self, ids: SetIds, slot: int) -> npt.NDArray[np.bool_]:
        """Which of the sets contain the slot. Shape (n,) → (n,)."""
        held: npt.NDArray[np.bool_] = self.masks[ids, slot >> 6] & np.uint64(1 << (slot & 63)) != 0
        return held

    def toggle(self, ids: SetIds, slot: int) -> SetIds:
        """The numbers of the given distinct sets with the slot added where absent, removed where present."""
        rows = self.masks.take(ids, axis=0)
        rows[:, slot >> 6] ^= np.uint64(1 << (slot & 63))
        return self._intern(self._zobrist.take(ids) ^ self._pod_keys[slot], rows)

    def strip(self, ids: SetIds, mask: U64Array) -> SetIds:
        """The numbers of the given sets without the members in the mask, of which each has at least one."""
        rows = self.masks.take(ids, axis=0)
        row, slot = np.nonzero(unpack(rows & mask))
        starts = np.flatnonzero(np.diff(row, prepend=-1))
        hashes = self._zobrist.take(ids) ^ np.bitwise_xor.reduceat(self._pod_keys.take(slot), starts)
        distinct, first, which = np.unique(hashes, return_index=True, return_inverse=True)
        return self._intern(distinct, rows[first] & ~mask)[which]

    def move(self, old: SetIds, new: SetIds, counts: npt.NDArray[np.int32]) -> None:
        """`counts[i]` entries went from `old[i]` (distinct) to `new[i]`. Frees the sets that no entry
        uses."""
        np.add.at(self._refs, new, counts)
        self._refs[old] -= counts
        self._refs[0] = 0
        dead = old[(self._refs.take(old) == 0) & (old != 0)]
        if dead.size:
            self._by_hash.delete(self._by_hash.find(self._zobrist.take(dead)))
            self._free.extend(dead.tolist())

    def touch(self, ids: SetIds, mask: U64Array) -> npt.NDArray[np.bool_]:
        """Which of the sets have a member in the mask (W words). Shape (n,) → (n,)."""
        touched = np.zeros(ids.size, dtype=bool)
        for word in np.flatnonzero(mask):
            touched |= self.masks[ids, word] & mask[word] != 0
        return touched

    def _intern(self, hashes: U64Array, rows: U64Array) -> SetIds:
        """Numbers of the sets with these distinct Zobrist hashes and members; missing ones are made."""
        found = self._by_hash.find(hashes)
        known = found >= 0
        out = np.zeros(hashes.size, dtype=np.uint32)
        out[known] = self._by_hash.get(found[known])
        missing = np.flatnonzero(~known & (hashes != 0))
        if missing.size:
            fresh = self._allocate(missing.size)
            self.masks[fresh] = rows[missing]
            self._zobrist[fresh] = hashes[missing]
            self._by_hash.insert(hashes[missing], fresh)
            out[missing] = fresh
        return out

    def _allocate(self, count: int) -> SetIds:
        reused = self._free[-count:] if self._free else []
        del self._free[len(self._free) - len(reused) :]
        fresh = count - len(reused)
        if self._rows + fresh > len(self.masks):
            grow = max(self._rows + fresh, len(self.masks) + min(len(self.masks), GROW_ROWS))
            self.masks.resize((grow, self.words), refcheck=False)
            self._zobrist.resize(grow, refcheck=False)
            self._refs.resize(grow, refcheck=False)
        ids = np.array(reused + list(range(self._rows, self._rows + fresh)), dtype=np.uint32)
        self._rows += fresh
        return ids


def unpack(masks: U64Array) -> npt.NDArray[np.uint8]:
    """Rows of W words as rows of 64 x W zeros and ones, slot 0 first."""
    return np.unpackbits(masks.astype("<u8", copy=False).view(np.uint8), axis=1, bitorder="little")
