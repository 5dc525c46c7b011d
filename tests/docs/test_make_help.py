"""`make help` lists every target that people type, with what it does."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_help_lists_every_target_with_a_sentence() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    # Not as a part of the make that runs the tests: it would announce the folder.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    out = subprocess.run(
        ["make", "help"], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    ).stdout
    assert {line.split()[0] for line in out.splitlines()} == {*phony[1].split()}
    assert all(len(line.split()) > 2 for line in out.splitlines())
