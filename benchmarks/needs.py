"""What a benchmark needs and this machine lacks, in one sentence each, in place of a traceback."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["absent", "missing", "need"]

_HOW = {
    "nginx": "apt-get install nginx-light",
    "wrk": "apt-get install wrk",
    "node": "https://nodejs.org, or apt-get install nodejs",
    "vllm-router": "python -m venv /tmp/routers && /tmp/routers/bin/pip install vllm-router, then --routers "
    "/tmp/routers",
    "sglang-router": "python -m venv /tmp/routers && /tmp/routers/bin/pip install sglang-router, then "
    "--routers /tmp/routers",
    "torch": "make setup",
    "triton": "pip install triton; it comes with PyTorch for CUDA",
    "matplotlib": "pip install matplotlib",
    "nanovllm": "git clone https://github.com/GeeeekExplorer/nano-vllm and pip install it beside flash-attn",
}


def missing(programs: Sequence[str] = (), modules: Sequence[str] = (), gpus: int = 0) -> list[str]:
    """Return a sentence for each of `programs` (names or paths) and `modules` that is not here, and one if
    there are fewer than `gpus` CUDA devices."""
    found = [
        f"the program {name} is missing: {_how(name)}" for name in programs if shutil.which(name) is None
    ]
    found += [
        f"the Python package {name} is missing: {_how(name)}"
        for name in modules
        if importlib.util.find_spec(name) is None
    ]
    if gpus:
        here = _gpus()
        if here < gpus:
            found.append(
                f"{gpus} CUDA device(s) are needed, and PyTorch sees {here}: run this on a GPU machine"
            )
    return found


def need(*, programs: Sequence[str] = (), modules: Sequence[str] = (), gpus: int = 0) -> None:
    """End the benchmark with what is missing and how to get it, if anything is.

    Of several GPUs one is enough where LEADLINE_TP_SHARE_GPU lets the ranks share it."""
    if os.environ.get("LEADLINE_TP_SHARE_GPU"):
        gpus = min(gpus, 1)
    found = missing(programs, modules, gpus)
    if found:
        _end(found)


def absent(error: ModuleNotFoundError) -> NoReturn:
    """End a benchmark whose imports failed with the package that is missing."""
    _end(missing(modules=[(error.name or "").partition(".")[0]]) or [str(error)])


def _end(found: list[str]) -> NoReturn:
    raise SystemExit(f"{sys.argv[0]} cannot run here:\n  " + "\n  ".join(found))


def _how(name: str) -> str:
    return _HOW.get(name.rpartition("/")[2], "install it")


def _gpus() -> int:
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
