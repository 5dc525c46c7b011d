"""What tests on a real cluster share; without KUBECONFIG the last lines of a run say so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from real_cluster import Cluster

HOW = (
    "KUBECONFIG is not set. Name a cluster that has the images: `../shared/cluster/up.sh DIR`, or kind, then "
    "`tests/e2e/images/load.sh` and `make e2e` (docs/install.md)"
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster: needs the Kubernetes cluster that KUBECONFIG names")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """KUBECONFIG decides, and nothing else: with it, a tool or image that is missing is a failure."""
    if os.environ.get("KUBECONFIG"):
        return
    for item in items:
        if item.get_closest_marker("cluster"):
            item.add_marker(pytest.mark.skip(reason=f"no cluster: {HOW}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    missed = [
        report
        for report in terminalreporter.stats.get("skipped", [])
        if "no cluster: KUBECONFIG" in str(report.longrepr)
    ]
    if missed:
        terminalreporter.section("the cluster tests did not run", yellow=True, bold=True)
        terminalreporter.write_line(f"{len(missed)} tests: {HOW}", yellow=True)


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    kubeconfig = os.environ["KUBECONFIG"].split(os.pathsep)[0]
    assert Path(kubeconfig).is_file(), f"KUBECONFIG names {kubeconfig}, which is not there"
    return Cluster(kubeconfig)
