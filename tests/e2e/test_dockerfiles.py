"""What the three Dockerfiles promise that can be read off them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["engine", "gateway", "operator"])
def test_every_stage_is_built_on_the_base_that_is_given_which_may_be_named_by_digest(name: str) -> None:
    text = (ROOT / name / "Dockerfile").read_text()
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?$", text, re.M)
    assert {base for base, _ in stages} - {name for _, name in stages} == {"${BASE}"}
    default = re.findall(r"^ARG BASE=(\S+)$", text, re.M)
    assert len(default) == 1
    # Nothing is put behind the name: what is given may end with @sha256:….
    assert f"--build-arg BASE={default[0]}@sha256:" in text


@pytest.mark.parametrize("name", ["engine", "gateway", "operator"])
def test_images_run_as_nobody(name: str) -> None:
    text = (ROOT / name / "Dockerfile").read_text()
    assert re.findall(r"^USER (\S+)$", text, re.M) == ["65532:65532"]
