"""The Valkey server that this folder's tests share, emptied for each."""

from collections.abc import Iterator

import pytest
import redis

from leadline.cli.valkey import EmbeddedValkey


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey.start() as server:
        yield server


@pytest.fixture
def valkey(valkey_server: EmbeddedValkey) -> EmbeddedValkey:
    if not valkey_server.running:
        valkey_server.restart()
    redis.Redis.from_url(valkey_server.url).flushall()
    return valkey_server
