"""Where the kernel says what a container may use. Sources: the kernel's cgroup-v2.rst and cgroup-v1 pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["MEMBERSHIP", "ROOT", "cgroup_folders"]

MEMBERSHIP = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")


def cgroup_folders(controller: str, membership: Path = MEMBERSHIP, root: Path = ROOT) -> Iterator[Path]:
    """Yield the folders of this process' cgroup and of those above it, for `controller` (cpu, memory).

    `membership` names our cgroup by hierarchy. In a container its path may be the host's, of which only the
    last part, or nothing, is mounted at `root`, so some of the folders may not exist.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        tops = [root / controllers, root / controller] if controllers else [root]
        inside = PurePosixPath(path.lstrip("/"))
        for top in tops:
            for part in (inside, *inside.parents):
                yield top / part
