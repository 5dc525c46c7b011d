"""Whether all ranks sampled the same tokens: a check for tests and for doubts, off by default."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from leadline.engine.core.plan import StepHandle
from leadline.engine.runner.collectives.group import RankGroup

__all__ = ["checksums"]


def checksums(group: RankGroup, handle: StepHandle) -> list[int]:
    """A checksum of the step's number and tokens, of each rank in order. Waits for the step."""
    result = handle.wait()
    own = zlib.crc32(np.array(result.tokens, dtype=np.int64).tobytes(), result.step_id & 0xFFFFFFFF)
    return group.all_gather(torch.tensor([[own]], dtype=torch.int64, device=group.device))[0].tolist()
