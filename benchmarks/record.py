"""Append measured values to benchmarks/results.jsonl, one JSON object a line, with how to repeat them."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

__all__ = ["record"]

RESULTS = Path(__file__).parent / "results.jsonl"


def record(
    workload: str,
    value: float,
    unit: str,
    *,
    engine: str = "leadline",
    engine_version: str | None = None,
    peer_ratio: float | None = None,
) -> None:
    """`peer_ratio`: our value over the peer's, where one was measured in the same run."""
    line = {
        "workload": workload,
        "engine": engine,
        "engine_version": engine_version or version("leadline"),
        "value": value,
        "unit": unit,
        "peer_ratio": peer_ratio,
        "machine": machine(),
        "commit": commit(),
        "command": "python " + shlex.join([os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def machine() -> str:
    """Processor, cores and memory, in words."""
    model = platform.processor() or platform.machine()
    gib = 0.0
    if os.path.exists("/proc/cpuinfo"):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
        gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {gib:.0f} GiB, Python {platform.python_version()}"


def commit() -> str:
    """Short commit hash of the checkout, or "unknown"."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
