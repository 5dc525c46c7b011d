"""How many cores this process may use: what it may run on, and no more than its cgroup grants time for.

A container's CPU limit is a quota of time, not a set of cores: on a node of 64 cores a pod with
`limits.cpu: 2` sees 64, and as many computing threads would stand still for most of each period. Sources: the
kernel's cgroup-v2.rst (`cpu.max`) and sched-bwc.rst (`cpu.cfs_quota_us`, cgroup v1).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path, PurePosixPath

__all__ = ["cpu_quota", "usable_cores"]


def usable_cores() -> int:
    """Cores that this process may run on, at most the whole cores of its quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Cores' worth of time that this process' cgroup and those above it grant; None without a limit.

    `membership` names our cgroup by hierarchy. In a container its path may be the host's, of which
    only the last part, or nothing, is mounted at `root`: every folder on the path that is there counts.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        tops = [root / controllers, root / "cpu"] if controllers else [root]
        inside = PurePosixPath(path.lstrip("/"))
        for top in tops:
            for part in (inside, *inside.parents):
                limits.append(_limit(top / part))
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (folder / "cpu.max").read_text().split()
        return float(quota) / float(period) if quota != "max" else None
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        time = float((folder / "cpu.cfs_quota_us").read_text())
        return time / float((folder / "cpu.cfs_period_us").read_text()) if time > 0 else None
    return None
