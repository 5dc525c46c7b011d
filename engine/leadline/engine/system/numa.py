"""Binding a process to the CPUs of one NUMA node: the GPU's, by what /sys says.

    GPU's PCI address ──▶ /sys/bus/pci/devices/ADDRESS/numa_node ──▶ /sys/devices/system/node/nodeN/cpulist
                                                                        ∩ the CPUs this process may use

Memory that the process touches first afterwards comes from that node by itself. A host with one node, a GPU
of no known node and a container without CPUs of the node are left alone, with a line in the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from leadline.engine.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["bind_process", "choose_cpus", "parse_cpulist", "pci_address"]

logger = logging.getLogger("leadline.engine.system.numa")


def bind_process(setting: str, device: torch.device) -> frozenset[int] | None:
    """Bind every thread of this process as `numa` says: "off", "auto" (the node of `device`), or a node's
    number. Returns the CPUs, or None if nothing was changed. Raises ConfigError for a node that is not there
    or has no CPU for us."""
    if setting == "off":
        return None
    cpus = choose_cpus(
        setting, pci_address(device) if device.type == "cuda" else None, frozenset(os.sched_getaffinity(0))
    )
    if cpus is None:
        return None
    try:
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
                os.sched_setaffinity(int(task.name), cpus)
    except OSError as error:  # a sandbox that forbids it; CPUs that were taken away meanwhile
        if setting != "auto":
            raise ConfigError(f"numa {setting}: this process cannot be bound: {error}") from error
        logger.warning("numa auto: this process cannot be bound: %s", error)
        return None
    return cpus


def choose_cpus(
    setting: str, pci: str | None, allowed: frozenset[int], root: Path = Path("/sys")
) -> frozenset[int] | None:
    """The CPUs to bind to, out of `allowed`; None: leave things as they are. `pci`: the GPU's address."""
    nodes = _nodes(root)
    if setting == "auto":
        if len(nodes) < 2:
            logger.info("numa auto: this host has one NUMA node; nothing to bind to")
            return None
        node = _node_of(pci, root)
        if node is None or node not in nodes:
            what = "there is no GPU" if pci is None else f"the node of GPU {pci} is not known"
            logger.info("numa auto: %s; not bound", what)
            return None
    else:
        node = int(setting)
        if node not in nodes:
            raise ConfigError(f"numa {node}: there is no such node; there are {sorted(nodes) or [0]}")
    cpus = nodes[node] & allowed
    if not cpus:
        message = f"this process may use no CPU of NUMA node {node} (cpulist {_show(nodes[node])})"
        if setting != "auto":
            raise ConfigError(f"numa {node}: {message}")
        logger.warning("numa auto: %s; not bound", message)
        return None
    logger.info("bound to NUMA node %d: CPUs %s", node, _show(cpus))
    return cpus


def pci_address(device: torch.device) -> str | None:
    """Of a CUDA device, as /sys spells it; None where torch does not tell."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    parts = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if None in parts:
        return None
    domain, bus, number = parts
    return f"{domain:04x}:{bus:02x}:{number:02x}.0"


def _nodes(root: Path) -> dict[int, frozenset[int]]:
    """Node → its CPUs; nodes of memory alone are left out."""
    nodes = {}
    for folder in (root / "devices/system/node").glob("node[0-9]*"):
        try:
            cpus = parse_cpulist((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cpus:
            nodes[int(folder.name.removeprefix("node"))] = cpus
    return nodes


def _node_of(pci: str | None, root: Path) -> int | None:
    if pci is None:
        return None
    try:
        node = int((root / "bus/pci/devices" / pci / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return None if node < 0 else node


def parse_cpulist(text: str) -> frozenset[int]:
    """ "0-3,8,10-11" → {0, 1, 2, 3, 8, 10, 11}. Raises ValueError."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _show(cpus: frozenset[int]) -> str:
    """As a cpulist."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
