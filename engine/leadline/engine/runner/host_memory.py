"""Memory of the host for a KV cache on a CPU: reserved at once, taken page by page as blocks are used."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from leadline.engine.errors import OutOfMemory
from leadline.engine.system.cgroups import MEMBERSHIP, ROOT, cgroup_folders

__all__ = ["lazy_zeros", "memory_limit"]

_ALIGNMENT = 64
_NO_LIMIT = 1 << 60
"""cgroup v1 has about 2**63 where there is no limit."""


def memory_limit(membership: Path = MEMBERSHIP, root: Path = ROOT) -> int:
    """Return the bytes that this process may use: the machine's, or its container's limit if that is less."""
    limits = [os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE]
    for folder in cgroup_folders("memory", membership, root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                limit = int((folder / name).read_text())
                if 0 < limit < _NO_LIMIT:
                    limits.append(limit)
    return min(limits)


def lazy_zeros(
    shapes: Sequence[Sequence[int]], dtype: torch.dtype, limit: int | None = None
) -> list[torch.Tensor]:
    """Return zeroed tensors that take no memory before they are written to, aligned to 64 bytes.

    Raises OutOfMemory if they do not fit beside what the process uses already within `limit` bytes (None:
    `memory_limit()`), since otherwise the kernel would end the process once they fill.
    """
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape in shapes]
    total = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
    used = _resident_bytes()
    limit = memory_limit() if limit is None else limit
    if used + total > limit:
        raise OutOfMemory(
            f"the KV cache takes {total >> 20:,} MiB beside {used >> 20:,} MiB in use, and "
            f"{limit >> 20:,} MiB are allowed: lower cpu_kv_bytes, serve a smaller model, or raise the "
            "container's memory limit"
        )
    try:
        memory = mmap.mmap(-1, max(total, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OutOfMemory(
            f"the KV cache of {total >> 20:,} MiB cannot be reserved: {error.strerror}"
        ) from None
    with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensors, offset = [], 0
    for shape, size in zip(shapes, sizes, strict=True):
        flat = torch.frombuffer(memory, dtype=dtype, count=size // dtype.itemsize, offset=offset)
        tensors.append(flat.view(*shape))
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return tensors


def _resident_bytes() -> int:
    """Return what the process has in memory; 0 where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    return 0
