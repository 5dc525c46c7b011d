"""One line of benchmarks/results.jsonl for a measurement on a GPU.

The GPU machine has no git history and no installed distribution: LEADLINE_COMMIT names the commit there.
"""

from __future__ import annotations

import datetime
import os
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

__all__ = ["result_line"]


def result_line(
    workload: str,
    value: float,
    unit: str,
    *,
    model_shape: str,
    attention: str,
    peer: float | None = None,
    limit_share: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """`peer`: the best peer's value in the same unit; `limit_share`: part of what the hardware allows."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {
        "workload": workload,
        "engine": "leadline",
        "engine_version": _version(),
        "attention": attention,
        "model_shape": model_shape,
        "gpus": int(torch.cuda.is_available()),
        "value": round(value, 2),
        "unit": unit,
        "peer_ratio": round(value / peer, 3) if peer else None,
        "limit_share": round(limit_share, 3) if limit_share else None,
        "machine": f"{gpu}, torch {torch.__version__}, Python {sys.version.split()[0]}",
        "commit": os.environ.get("LEADLINE_COMMIT") or _commit(),
        "command": f"python3 benchmarks/{os.path.basename(sys.argv[0])} {shlex.join(sys.argv[1:])}".strip(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **more,
    }


def _version() -> str:
    try:
        return version("leadline")
    except PackageNotFoundError:
        return "source tree"


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
