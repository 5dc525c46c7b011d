"""The cluster under test. Without KUBECONFIG tests/conftest.py leaves them out and says so; with it,
a tool or an image that is missing is a failure."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from real_cluster import Cluster

IMAGES_SECONDS = 1500.0


@pytest.fixture(scope="session")
def cluster(images: str) -> Cluster:
    kubeconfig = os.environ["KUBECONFIG"].split(os.pathsep)[0]
    assert Path(kubeconfig).is_file(), f"KUBECONFIG names {kubeconfig}, which is not there"
    return Cluster(kubeconfig)


@pytest.fixture(scope="session")
def images() -> str:
    """What building the images printed, once they are in the cluster. `.ci/run` builds them while other tests
    run, and LEADLINE_E2E_IMAGES_LOG is where it logs that; elsewhere they were made beforehand."""
    name = os.environ.get("LEADLINE_E2E_IMAGES_LOG")
    if name is None:
        return ""
    log, ends = Path(name), time.monotonic() + IMAGES_SECONDS
    while not (text := log.read_text()).endswith(("images: done\n", "images: failed\n")):
        assert time.monotonic() < ends, f"images took too long:\n{text[-3000:]}"
        time.sleep(0.5)
    assert text.endswith("images: done\n"), f"images could not be built:\n{text[-3000:]}"
    return text
