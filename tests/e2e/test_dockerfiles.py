"""What the three Dockerfiles promise that can be read off them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
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


def test_the_stage_that_converts_the_demo_model_has_all_that_the_conversion_imports(tmp_path: Path) -> None:
    stage = (ROOT / "engine" / "Dockerfile").read_text().split(" AS demo\n")[1].split("\nFROM ")[0]
    copied = re.findall(r"^COPY (.+) (\S+)$", stage, re.M)
    assert copied
    for sources, target in copied:
        for source in map(ROOT.joinpath, sources.split()):
            if source.is_dir():
                shutil.copytree(source, tmp_path / target)
            else:
                (tmp_path / target).mkdir(parents=True, exist_ok=True)
                shutil.copy(source, tmp_path / target)
    command = [sys.executable, "-c", "import leadline.engine.hub.demo as m; print(m.__file__)"]
    paths = {"PYTHONPATH": "protocol:engine", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=paths, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
