"""A Valkey of this folder's own: its tests stop, kill and flush it."""

from collections.abc import Iterator

import pytest

from leadline.cli.valkey import EmbeddedValkey


@pytest.fixture
def valkey() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey.start() as server:
        yield server
