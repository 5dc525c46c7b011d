"""What segments of texts tokenize to: each is tokenized once while it is remembered.

Room: gateway/tokens. A conversation's next turn begins with the segments of the turn before, so only the new
ones are tokenized; a system prompt is tokenized once for everybody. Keys are the segments' own text, not a
hash of it: a hit is exact.
"""

import itertools
import sys

import msgspec

from leadline.gateway.tokens.lru import ByteLRU

__all__ = ["Segment", "SegmentMemo"]

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
