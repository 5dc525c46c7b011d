"""How many cores this process may use: what it may run on, and no more than its cgroup grants time for.

A container's CPU limit is a quota of time, not a set of cores: on a node of 64 cores a pod with
`limits.cpu: 2` sees 64, and as many computing threads would stand still for most of each period. Sources: the
kernel's cgroup-v2.rst (`cpu.max`) and sched-bwc.rst (`cpu.cfs_quota_us`, cgroup v1).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from leadline.engine.system.cgroups import MEMBERSHIP, ROOT, cgroup_folders

__all__ = ["cpu_quota", "usable_cores"]


def usable_cores() -> int:
    """Cores that this process may run on, at most the whole cores of its quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(membership: Path = MEMBERSHIP, root: Path = ROOT) -> float | None:
    """Cores' worth of time that this process' cgroup and those above it grant; None without a limit."""
    limits = map(_limit, cgroup_folders("cpu", membership, root))
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (folder / "cpu.max").read_text().split()
        return float(quota) / float(period) if quota != "max" else None
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        time = float((folder / "cpu.cfs_quota_us").read_text())
        return time / float((folder / "cpu.cfs_period_us").read_text()) if time > 0 else None
    return None
