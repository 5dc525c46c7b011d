"""The folder in which tests/clients/install.sh puts the clients."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["clients_folder"]

_HERE = Path(__file__).parent


def clients_folder() -> Path:
    """Install what is missing and return the folder. Where that is impossible, fail in CI and skip the test
    elsewhere, with the reason. Without a way to npm's registry the test is skipped in CI too."""
    folder = Path(os.environ.get("LEADLINE_CLIENTS") or _HERE.parents[1] / ".clients").absolute()
    subprocess.run([str(_HERE / "install.sh"), str(folder), sys.executable], check=True, timeout=600)
    failed = folder / "failed"
    if failed.exists():
        reason = f"the clients cannot be installed: {failed.read_text()}"
        in_ci = os.environ.get("CI") or os.environ.get("LEADLINE_CI")
        if in_ci and not (folder / "unreachable").exists():
            pytest.fail(reason)
        pytest.skip(reason)
    return folder
