"""Prefix chains of prompts that begin like earlier ones: only blocks that are new are hashed.

Room: gateway/tokens. A tree with one node for each (prefix of a prompt in whole segments). A node holds the
blocks that were completed by its last segment and the full hash of the last of them, from which the chain
goes on:

    segments    |      s0      |   s1   |         s2         |
    blocks      |  b1  |  b2  |  b3  |  b4  |  b5  |  b6  |
    nodes         s0: b1 b2      s1: b3   s2: b4 b5 b6          (a block belongs to the segment that ends it)

Segments have serials, so a path is exact, not a guess by hash. Nodes are forgotten leaf first.
"""

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from leadline.gateway.tokens.lru import ByteLRU
from leadline.gateway.tokens.memo import Segment
from leadline.protocol.chain import ChainNamespace, chain_after, short

__all__ = ["ChainMemo", "root_of"]

_NODE_BYTES = 420
_FEW_BLOCKS = 8
"""So many are hashed sooner than they are looked up."""

root_of = lru_cache(maxsize=1024)(ChainNamespace.root)
"""The root of a namespace; most requests come in a few of them."""


@dataclass(slots=True, frozen=True, eq=False)
class _Node:
    serial: int
    shorts: tuple[int, ...]
    """Of the blocks that end within this segment."""
    last: bytes
    """Full hash of the last block up to here, or the root."""


class ChainMemo:
    """Computes chains of prompts given in segments. Not safe for threads."""

    def __init__(self, max_bytes: int) -> None:
        self._nodes: ByteLRU[tuple[bytes | int, int], _Node] = ByteLRU(max_bytes)
        self._serials = itertools.count()
        self.hashed_blocks = 0
        """Blocks hashed so far."""

    @property
    def used_bytes(self) -> int:
        return self._nodes.used_bytes

    def chain(self, namespace: ChainNamespace, segments: Sequence[Segment], ids: "array[int]") -> list[int]:
        """`short` of every full block of `ids`, which are the ids of `segments` joined."""
        if len(ids) < namespace.block_size:
            return []
        last = root = root_of(namespace)
        if len(ids) <= _FEW_BLOCKS * namespace.block_size:
            return [short(block) for block in chain_after(root, ids, namespace.block_size)]
        shorts: list[int] = []
        where: bytes | int = root
        path: list[tuple[bytes | int, int]] = []
        for segment in segments:
            node = self._nodes.peek((where, segment.serial))
            if node is None:
                break
            path.append((where, segment.serial))
            shorts += node.shorts
            where, last = node.serial, node.last
        known = len(path)
        fresh: list[tuple[tuple[bytes | int, int], _Node]] = []
        size = namespace.block_size
        end = sum(segment.num_tokens for segment in segments[:known])
        for segment in segments[known:]:
            end += segment.num_tokens
            hashes = chain_after(last, ids[len(shorts) * size : end // size * size], size)
            last = hashes[-1] if hashes else last
            node = _Node(next(self._serials), tuple(map(short, hashes)), last)
            self.hashed_blocks += len(hashes)
            shorts += node.shorts
            fresh.append(((where, segment.serial), node))
            where = node.serial
        # Children first, so that a parent is always the younger one.
        for key, node in reversed(fresh):
            self._nodes.put(key, node, _NODE_BYTES + 40 * len(node.shorts))
        for key in reversed(path):
            self._nodes.touch(key)
        return shorts
