"""Cluster tests that do not run are reported in the last line, with the way to run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def test_the_last_line_says_what_did_not_run_and_how_to_run_it() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", str(FOLDER / "test_six_lines.py")],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    last = done.stdout.strip().splitlines()[-1]
    assert "cluster tests did not run: set KUBECONFIG" in last
    assert int(last.split()[0]) >= 3
    for hint in ("kind create cluster", "make images CLUSTER=kind", "docs/install.md"):
        assert hint in last
