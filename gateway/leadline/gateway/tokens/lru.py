"""A cache bounded by the bytes its entries are said to take; the least recently used leave first.

Room: gateway/tokens. Not safe for threads: it lives on one event loop.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["ByteLRU"]

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
