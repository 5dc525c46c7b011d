"""Whether all ranks sampled the same tokens: a check for tests and for doubts, off by default."""

from __future__ import annotations

import zlib

import torch

from leadline.engine.runner.handle import RunnerHandle
from leadline.engine.runner.parallel.group import RankGroup

__all__ = ["checksums"]


def checksums(group: RankGroup, handle: RunnerHandle) -> list[int]:
    """A checksum of the step's number and tokens, of each rank in order. Waits for the step."""
    if handle.event is not None:
        handle.event.synchronize()
    tokens = b"" if handle.tokens is None else handle.tokens.numpy().tobytes()
    own = zlib.crc32(tokens, handle.step_id & 0xFFFFFFFF)
    return group.all_gather(torch.tensor([[own]], dtype=torch.int64, device=group.device))[0].tolist()
