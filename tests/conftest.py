"""Global settings of the tests, made before anything imports torch: no network, few threads."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from leadline.cli.valkey import EmbeddedValkey

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Two cores run everything, and several processes at once: more threads would only fight each other.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "2")


_LEFT_OUT = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `cluster` need one that KUBECONFIG names; without it they are deselected, and said so.

    With it they come last, and those of tests/e2e after the others: only they need our images, which
    `.ci/run` builds meanwhile."""
    if os.environ.get("KUBECONFIG"):
        end_to_end = Path(__file__).parent / "e2e"
        items.sort(
            key=lambda item: (
                item.get_closest_marker("cluster") is not None,
                item.get_closest_marker("cluster") is not None and end_to_end in item.path.parents,
            )
        )
        return
    left_out = [item for item in items if item.get_closest_marker("cluster")]
    if left_out:
        items[:] = [item for item in items if not item.get_closest_marker("cluster")]
        config.hook.pytest_deselected(items=left_out)
        config.stash[_LEFT_OUT] = len(left_out)


def pytest_unconfigure(config: pytest.Config) -> None:
    """After the summary, so that it is the last thing printed."""
    count = config.stash.get(_LEFT_OUT, 0)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if count and reporter is not None:
        reporter.write_line(
            f"{count} cluster tests did not run: set KUBECONFIG to a cluster that has the images. "
            "kind: kind create cluster; make images CLUSTER=kind. "
            "Here: ../shared/cluster/up.sh DIR; make images CLUSTER=DIR. See docs/install.md",
            yellow=True,
        )


@pytest.fixture(scope="session")
def valkey_server() -> "Iterator[EmbeddedValkey]":
    from leadline.cli.valkey import EmbeddedValkey

    with EmbeddedValkey.start() as server:
        yield server


@pytest.fixture
def valkey(valkey_server: "EmbeddedValkey") -> "EmbeddedValkey":
    """The Valkey server that all tests share: running and empty."""
    import redis

    if not valkey_server.running:
        valkey_server.restart()
    redis.Redis.from_url(valkey_server.url).flushall()
    return valkey_server
