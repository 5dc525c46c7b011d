"""The cluster under test. Without KUBECONFIG tests/conftest.py leaves them out and says so; with it,
a tool or an image that is missing is a failure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from real_cluster import Cluster


@pytest.fixture(scope="session")
def cluster(images: str) -> Cluster:
    kubeconfig = os.environ["KUBECONFIG"].split(os.pathsep)[0]
    assert Path(kubeconfig).is_file(), f"KUBECONFIG names {kubeconfig}, which is not there"
    return Cluster(kubeconfig)
