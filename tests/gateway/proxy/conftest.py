"""An engine that tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import Engine, engines

from leadline.engine.hub import resolve_model


@pytest.fixture(scope="session")
def engine(small_model: Path) -> Iterator[Engine]:
    """The small model, served as m: it has the demo model's tokenizer and answers quickly."""
    with engines(1, model=str(small_model)) as (one,):
        yield one


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The demo model's files, for the gateway's tokenizer."""
    return resolve_model("smollm2", progress=False).path
