"""The KV blocks of one engine: who references them, which are cached, which are free.

Every block is in exactly one of three states, so  free + cached + used = num_blocks  always holds:

    free     no reference, no content worth keeping          in the free list
    cached   no reference, its hash is in the prefix index   held by the eviction policy
    used     referenced by one or more block tables          indexed or not

           allocate                     commit: its hash enters the index
    free ───────────▶ used (private) ─────────────▶ used (indexed) ◀───┐
      ▲                  │ release                        │ release    │ acquire (a prefix hit)
      ├──────────────────┘                                ▼            │
      └───────────────────────────── evict ──────────── cached ────────┘

The index maps the full 128-bit chain hash to one block. A second block computed with an indexed hash stays
private: it is not found by others and returns to the free list, unless the indexed one is gone by then, in
which case it takes that place. Block ids are 0 .. num_blocks - 1 and all ordinary: there is no null block.

The pool knows nothing of sequences or of time. It trusts the scheduler's promise that plans run in the order
in which they were made, which is why a block may be indexed, or given to someone else, before the device has
caught up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from leadline.engine.core.eviction import EvictionPolicy, LRUEviction
from leadline.engine.errors import ConfigError, EngineError

__all__ = ["BlockPool", "IntegrityError", "PoolListener"]


class IntegrityError(EngineError):
    """An invariant of the core is broken: a bug of ours (or of a custom policy), never a caller's mistake."""


class PoolListener(Protocol):
    """Hears what enters and leaves the prefix index, in order: the source of cache events."""

    def stored(self, block_hash: bytes) -> None: ...

    def removed(self, block_hash: bytes) -> None: ...

    def cleared(self) -> None: ...


class BlockPool:
    """Reference counts, free list and prefix index of `num_blocks` blocks."""

    def __init__(
        self, num_blocks: int, eviction: EvictionPolicy | None = None, listener: PoolListener | None = None
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_kv_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self.listener = listener
        self._eviction: EvictionPolicy = LRUEviction() if eviction is None else eviction
        self._refs = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._chain = [
            0
        ] * num_blocks  # blocks of the longest table that released it; a parent's is never smaller
        self._index: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks without reference and without content worth keeping."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without reference that a prefix hit could use."""
        return len(self._eviction)

    @property
    def num_used(self) -> int:
        """Blocks that a block table references."""
        return self.num_blocks - len(self._free) - len(self._eviction)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out: free ones, then cached ones by eviction."""
        return len(self._free) + len(self._eviction)

    def contains(self, block_hash: bytes) -> bool:
        return block_hash in self._index

    def hashes(self) -> list[bytes]:
        """Every indexed hash: the content of a snapshot."""
        return list(self._index)

    def match(self, hashes: Sequence[bytes], limit: int) -> list[int]:
        """Blocks of the longest indexed prefix of hashes[:limit], not yet referenced on anyone's behalf."""
        index = self._index
        found = []
        for position in range(limit):
            block = index.get(hashes[position])
            if block is None:
                break
            found.append(block)
        return found

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` would stop being available when acquired."""
        refs = self._refs
        return sum(not refs[block] for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these indexed blocks (a prefix hit)."""
        for block in blocks:
            if not self._refs[block]:
                self._eviction.remove(block)
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; the caller has checked `num_available`."""
        return [self.allocate_one() for _ in range(count)]

    def allocate_one(self) -> int:
        """One block with one reference.

        Evicts when nothing is free. Raises IntegrityError when nothing is available.
        """
        block = self._free.pop() if self._free else self._evict()
        self._refs[block] = 1
        self._chain[block] = 0
        return block

    def commit(self, block: int, block_hash: bytes) -> bool:
        """Say that `block`, which the caller references, holds (or will, in step order) what the hash names.

        True if the block is now indexed, False if another block holds that hash and this one stays private.
        """
        self._hash[block] = block_hash
        if self._index.setdefault(block_hash, block) != block:
            return False
        if self.listener is not None:
            self.listener.stored(block_hash)
        return True

    def release(self, table: Sequence[int]) -> None:
        """Take one reference off each block of a block table, deepest first."""
        length = len(table)
        for block in reversed(table):
            left = self._refs[block] - 1
            if left < 0:
                raise IntegrityError(f"block {block} is released but has no reference")
            self._refs[block] = left
            if self._chain[block] < length:
                self._chain[block] = length
            if not left:
                self._retire(block)

    def reset(self) -> int:
        """Forget every hash; blocks in use stay with their sequences, unindexed.

        Returns how many hashes were dropped.
        """
        dropped = len(self._index)
        self._free.extend(block for block in self._index.values() if not self._refs[block])
        self._index.clear()
        self._eviction.clear()
        self._hash = [None] * self.num_blocks
        if self.listener is not None:
            self.listener.cleared()
        return dropped

    def _retire(self, block: int) -> None:
        """`block` lost its last reference: cache it or free it."""
        block_hash = self._hash[block]
        if block_hash is None:
            self._free.append(block)
            return
        twin = self._index.get(block_hash)
        if twin is None:  # the indexed block was evicted meanwhile: this one takes its place
            self.commit(block, block_hash)
        elif twin != block:
            self._hash[block] = None
            self._free.append(block)
            # The twin stands in for the parent of blocks just released: it must not be evicted before them.
            self._chain[twin] = max(self._chain[twin], self._chain[block])
            if self._refs[twin]:
                return
            self._eviction.remove(twin)
            block = twin
        self._eviction.add(block, self._chain[block])

    def _evict(self) -> int:
        if not len(self._eviction):
            raise IntegrityError("no block is available; the caller must check num_available first")
        block = self._eviction.pop()
        block_hash = self._hash[block]
        if self._refs[block] or block_hash is None or self._index.get(block_hash) != block:
            name = type(self._eviction).__name__
            raise IntegrityError(f"eviction policy {name} chose block {block}, which is not evictable")
        del self._index[block_hash]
        self._hash[block] = None
        if self.listener is not None:
            self.listener.removed(block_hash)
        return block

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Raise IntegrityError unless all counts agree.

        With `tables`, also unless references are exactly theirs.
        """

        def need(ok: bool, what: str) -> None:
            if not ok:
                raise IntegrityError(what)

        free = set(self._free)
        need(len(free) == len(self._free), "a block is twice in the free list")
        for block_hash, block in self._index.items():
            need(self._hash[block] == block_hash, f"block {block} is indexed under a hash it does not have")
        cached = {block for block in self._index.values() if not self._refs[block]}
        need(
            len(cached) == len(self._eviction),
            f"{len(cached)} cached blocks, policy holds {len(self._eviction)}",
        )
        need(not free & cached, "a cached block is in the free list")
        used = {block for block, refs in enumerate(self._refs) if refs}
        need(min(self._refs) >= 0, "a reference count is negative")
        need(not free & used, "a referenced block is in the free list")
        need(len(free) + len(cached) + len(used) == self.num_blocks, "free + cached + used != total")
        need(all(self._hash[block] is None for block in free), "a free block has a hash")
        if tables is not None:
            counts = Counter(block for table in tables for block in table)
            wrong = [b for b in range(self.num_blocks) if counts[b] != self._refs[b]]
            need(not wrong, f"reference counts of blocks {wrong} differ from the block tables'")
