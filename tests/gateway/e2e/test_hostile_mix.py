"""Hostile clients beside well-behaved streams, for a few seconds: benchmarks/hostile_mix.py, whose long form
measures the gaps as well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "hostile_mix.py"


@pytest.mark.slow
def test_hostile_clients_leave_nothing_behind_and_break_no_stream_beside_them() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--seconds=6", "--check"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
