"""Namespaces of the real cluster, for the tests marked `cluster`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_tools import Cluster, install_definition


@pytest.fixture(scope="module")
def definition() -> None:
    """The CRD is installed."""
    install_definition()


@pytest.fixture
def cluster(definition: None) -> Iterator[Cluster]:
    """A namespace of its own for each test."""
    made = Cluster()
    yield made
    made.close()


@pytest.fixture(scope="module")
def namespace(definition: None) -> Iterator[Cluster]:
    """A namespace that the tests of a file share."""
    made = Cluster()
    yield made
    made.close()
