"""An eviction policy: segmented LRU, which a scan of one-off prompts cannot flush.

    new ──▶ [ probation ] ──evicted first──▶
               │ hit
               ▼
            [ protected ] ──evicted when it holds more than 3/4 of all cached blocks──▶

A block enters probation; a prefix hit moves it to the protected segment. Within a segment the least recently
used block goes first. In rare cases a protected child outlives its parent (the parent was in use when the
child was hit): that costs a hit, never correctness.

    [project.entry-points."leadline.eviction_policies"]
    scan-resistant = "scan_resistant:ScanResistantEviction"
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["ScanResistantEviction"]


class ScanResistantEviction:
    """O(1) for every operation."""

    def __init__(self) -> None:
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._hit: set[int] = set()

    def add(self, block: int, chain_length: int) -> None:
        segment = self._protected if block in self._hit else self._probation
        segment[block] = None

    def remove(self, block: int) -> None:
        segment = self._protected if block in self._protected else self._probation
        del segment[block]
        self._hit.add(block)

    def pop(self) -> int:
        crowded = len(self._protected) > 3 * len(self._probation)
        block, _ = (self._protected if crowded else self._probation).popitem(last=False)
        self._hit.discard(block)
        return block

    def clear(self) -> None:
        self._probation.clear()
        self._protected.clear()
        self._hit.clear()

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)
