"""Engines over several ranks, on the shallow model and on tiny ones. Borrows parts of other folders."""

# ruff: noqa: E402 - the neighbours' folders have to be on the path first

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for neighbour in ("exact", "models", "server"):
    sys.path.append(str(Path(__file__).parent.parent / neighbour))

import torch
from exact_rig import Rig
from parallel_rig import ParallelRig

from leadline.engine.hub import resolve_model
from leadline.engine.hub.local import LocalModel
from leadline.engine.models.config import load_model_config
from leadline.engine.models.loader import load_model
from leadline.protocol.text.tokenizer import Tokenizer
from shallow_model import shallow_model


@pytest.fixture(autouse=True)
def _ranks_compare_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEADLINE_TP_CHECK", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def local() -> LocalModel:
    """The shallow copy of the demo model: what ranks do is the same in each layer."""
    return shallow_model(resolve_model("smollm2", progress=False))


@pytest.fixture(scope="session")
def rig(local: LocalModel) -> Rig:
    """Builds engines of one rank over the shallow model."""
    config = load_model_config(local.path)
    return Rig(local, load_model(local, config, dtype=torch.float32, device="cpu", progress=False))


@pytest.fixture(scope="session")
def tokenizer(local: LocalModel) -> Tokenizer:
    return Tokenizer.load(local.path)


@pytest.fixture
def ranks(local: LocalModel) -> Iterator[ParallelRig]:
    """Builds engines of several ranks and closes them."""
    built = ParallelRig(local)
    yield built
    built.close()
