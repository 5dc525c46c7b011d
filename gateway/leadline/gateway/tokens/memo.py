"""Caches of tokenized segments, prefix chains and whole prompts, bounded by bytes.

A conversation's next turn begins with the segments of the turn before, so only the new ones are tokenized; a
system prompt is tokenized once for all clients. Keys are the text itself, not a hash of it: a hit is exact.
"""

import itertools
import sys
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

import msgspec

from leadline.protocol.chain import ChainNamespace, chain_after, short
from leadline.protocol.openai.chat import ChatCompletionRequest
from leadline.protocol.text.chat import ChatRenderer
from leadline.protocol.text.prompts import tools_shown

__all__ = ["ByteLRU", "ChainMemo", "PromptMemo", "Segment", "SegmentMemo", "root_of"]


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteLRU(Generic[K, V]):
    """key → value. `max_bytes` bounds the sum of the costs given to `put`."""

    __slots__ = ("_entries", "max_bytes", "used_bytes")

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative, got {max_bytes}")
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def peek(self, key: K) -> V | None:
        """The value, its age unchanged."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def get(self, key: K) -> V | None:
        """The value, which counts as used now."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def touch(self, key: K) -> None:
        """Count an entry as used now, if it is there."""
        if key in self._entries:
            self._entries.move_to_end(key)

    def put(self, key: K, value: V, cost: int) -> None:
        """Add or replace an entry of `cost` bytes. One that is larger than the whole cache is not kept."""
        old = self._entries.pop(key, None)
        if old is not None:
            self.used_bytes -= old[1]
        if cost > self.max_bytes:
            return
        self._entries[key] = (value, cost)
        self.used_bytes += cost
        while self.used_bytes > self.max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self.used_bytes -= freed


_ENTRY_BYTES = 320
"""Of dict, tuple and object, beside text and ids."""


class Segment(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Some tokens in a row."""

    serial: int
    """Names these tokens among all segments of the process; never used twice."""
    packed: bytes
    """The ids, uint32 in the machine's byte order."""

    @property
    def num_tokens(self) -> int:
        return len(self.packed) // 4


class SegmentMemo:
    """Text → Segment, or packed ids → Segment, so that ids a client sends have a serial too."""

    def __init__(self, max_bytes: int) -> None:
        self._known: ByteLRU[str | bytes, Segment] = ByteLRU(max_bytes)
        self._serials = itertools.count()

    @property
    def used_bytes(self) -> int:
        return self._known.used_bytes

    def get(self, text: str) -> Segment | None:
        return self._known.get(text)

    def add(self, text: str, packed: bytes) -> Segment:
        """Remember what `text` tokenizes to."""
        segment = Segment(next(self._serials), packed)
        self._known.put(text, segment, sys.getsizeof(text) + len(segment.packed) + _ENTRY_BYTES)
        return segment

    def of_ids(self, packed: bytes) -> Segment:
        """The segment of these very ids."""
        segment = self._known.get(packed)
        if segment is None:
            segment = Segment(next(self._serials), packed)
            self._known.put(packed, segment, len(packed) + _ENTRY_BYTES)
        return segment


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
    """Computes chains of prompts given in segments, and hashes only blocks that are new. Not safe for
    threads.

    A tree with one node for each prefix of a prompt in whole segments. A node holds the blocks that were
    completed by its last segment, and the full hash of the last of them, from which the chain continues:

        segments    |      s0      |   s1   |         s2         |
        blocks      |  b1  |  b2  |  b3  |  b4  |  b5  |  b6  |
        nodes         s0: b1 b2      s1: b3   s2: b4 b5 b6          (a block belongs to the segment that ends
        it)

    Segments have serials, so a path is exact, not a guess by hash. Nodes are dropped leaf first.
    """

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


_LONGEST_KEY = 8192
"""Bytes of JSON: some 2,000 tokens."""
_MOST_MESSAGES = 16
_PROMPT_BYTES = 600
_encode = msgspec.json.Encoder().encode


class PromptMemo(Generic[V]):
    """(chat, root of the chain) → prompt: short chats that repeat are neither rendered nor hashed twice.

    Rendering a template costs more than everything else that the gateway does for a small request, and small
    requests repeat: probes, evaluations, the first turn of an assistant. A prompt is a function of messages,
    tools, template options and the namespace of its chain; their JSON is the key, so a hit is exact. Long
    conversations are not kept: their next turn differs, and segments serve it better. Nothing is kept for
    templates that read the clock (`strftime_now`). Not safe for threads.
    """

    def __init__(self, renderer: ChatRenderer, max_bytes: int) -> None:
        self._known: ByteLRU[bytes, V] = ByteLRU(max_bytes)
        self._timeless = not any("strftime_now" in source for source in renderer.sources.values())

    @property
    def used_bytes(self) -> int:
        return self._known.used_bytes

    def key(self, request: ChatCompletionRequest, root: bytes) -> bytes | None:
        """What the prompt is a function of; None for what is no short chat."""
        if len(request.messages) > _MOST_MESSAGES or request.resume_token_ids:
            return None
        try:
            key = _encode(
                (
                    request.messages,
                    tools_shown(request.tools, request.tool_choice),
                    request.add_generation_prompt,
                    request.continue_final_message,
                    request.chat_template_kwargs,
                    request.reasoning_effort,
                    root,
                )
            )
        except UnicodeEncodeError:  # half a surrogate pair
            return None
        return key if len(key) <= _LONGEST_KEY else None

    def get(self, key: bytes) -> V | None:
        return self._known.get(key)

    def put(self, key: bytes, prompt: V, cost: int) -> None:
        """`cost`: bytes that the prompt takes."""
        if self._timeless:
            self._known.put(key, prompt, len(key) + cost + _PROMPT_BYTES)
