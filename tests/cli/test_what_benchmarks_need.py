"""A benchmark on a machine that lacks what it needs says so in a sentence, and how to get it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


def test_the_http_benchmark_names_nginx_wrk_and_the_routers() -> None:
    done = run("gateway_http.py", "--routers=/nowhere", PATH="/nowhere")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for words in ("nginx is missing: apt-get install", "wrk is missing", "pip install vllm-router", "sglang"):
        assert words in done.stderr


@pytest.mark.parametrize("name", ["gpu_attention.py", "gpu_tp.py"])
def test_a_gpu_benchmark_asks_for_its_gpus(name: str) -> None:
    done = run(name, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "PyTorch sees 0" in done.stderr


@pytest.mark.parametrize("name", ["gpu_tp.py", "gpu_tp_exact.py"])
def test_ranks_that_share_a_gpu_ask_for_one(name: str) -> None:
    done = run(name, CUDA_VISIBLE_DEVICES="", LEADLINE_TP_SHARE_GPU="1")
    assert done.returncode == 1
    assert "1 CUDA device(s) are needed, and PyTorch sees 0" in done.stderr
