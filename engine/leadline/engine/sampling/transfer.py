"""Small host arrays to the device without waiting for it.

On CUDA a copy from pageable memory would wait for the stream's earlier work; pinned memory does not.
torch's pinned allocator keeps a buffer until the copy that reads it is done, so the caller may forget it at
once.
"""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["upload"]


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor on `device` with the array's values and dtype (on CPU it may share the array's memory)."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
