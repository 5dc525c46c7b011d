"""Tables by slot: rows for the few slots that need one, and small host arrays to the device without a wait.

On CUDA a copy from pageable memory would wait for the stream's earlier work; pinned memory does not. torch's
pinned allocator keeps a buffer until the copy that reads it is done, so the caller may drop it at once.
"""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["SlotRows", "upload"]


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor on `device` with the array's values and dtype (on CPU it may share the array's memory)."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


class SlotRows:
    """Gives rows to slots.

    Attributes:
        of_slot: int64 [max_slots], the row of each slot; -1: none.
        size: rows that a table must have.
    """

    def __init__(self, max_slots: int) -> None:
        self.of_slot = np.full(max_slots, -1, dtype=np.int64)
        self.size = 0
        self._free: list[int] = []

    def take(self, slot: int) -> int:
        """Return a row for the slot, which may have had another. `size` doubles where all rows are taken."""
        self.release(slot)
        if not self._free:
            old, self.size = self.size, max(4, 2 * self.size)
            self._free.extend(reversed(range(old, self.size)))
        row = self._free.pop()
        self.of_slot[slot] = row
        return row

    def release(self, slot: int) -> None:
        """Take the slot's row back; a slot without a row is fine."""
        row = int(self.of_slot[slot])
        if row >= 0:
            self.of_slot[slot] = -1
            self._free.append(row)
