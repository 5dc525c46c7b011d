"""Global settings of the tests, made before anything imports torch: no network, few threads."""

import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from leadline.cli.valkey import EmbeddedValkey

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Two cores run several processes at once. Threads that wait for each other by spinning are far slower than
# one as soon as something else wants a core: the same tests took 68 s with one and over 280 s with two.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")


_IMAGES_SECONDS = 1500.0
_LEFT_OUT = pytest.StashKey[int]()


_PROCESSES = re.compile(r"\b(subprocess|multiprocessing|EmbeddedValkey|LiveServer|Cluster)\b")
_PROCESS_FIXTURES = {"valkey", "valkey_server", "small_model", "images"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--check", action="store_true", help="only tests that start no process and take under ten seconds"
    )


def _is_quick(item: pytest.Item) -> bool:
    """Whether `make check` runs a test: it is not marked `slow`, and neither its file nor its fixtures start
    a process."""
    fixtures = set(getattr(item, "fixturenames", ()))
    if item.get_closest_marker("slow") or fixtures & _PROCESS_FIXTURES:
        return False
    return not _PROCESSES.search(item.path.read_text())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `cluster` need one that KUBECONFIG names; without it they are deselected, and counted.

    With it they come last, and at the very end those that need our images, which `.ci/run` builds
    meanwhile."""
    if config.getoption("check"):
        quick = [item for item in items if _is_quick(item)]
        config.hook.pytest_deselected(items=[item for item in items if not _is_quick(item)])
        items[:] = quick
    if os.environ.get("KUBECONFIG"):
        items.sort(
            key=lambda item: (
                item.get_closest_marker("cluster") is not None,
                "images" in getattr(item, "fixturenames", ()),
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
def images() -> str:
    """What building the images printed, once they are in the cluster. `.ci/run` builds them while other tests
    run, and LEADLINE_E2E_IMAGES_LOG is where it logs that; elsewhere they were made beforehand."""
    name = os.environ.get("LEADLINE_E2E_IMAGES_LOG")
    if name is None:
        return ""
    log, ends = Path(name), time.monotonic() + _IMAGES_SECONDS
    while not (text := log.read_text()).endswith(("images: done\n", "images: failed\n")):
        assert time.monotonic() < ends, f"images took too long:\n{text[-3000:]}"
        time.sleep(0.5)
    assert text.endswith("images: done\n"), f"images could not be built:\n{text[-3000:]}"
    return text


@pytest.fixture(scope="session")
def loopbacks() -> list[str]:
    """Those that this machine has, as in a URL: containers often have no IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as there:
            there.bind(("::1", 0))
    except OSError:
        return ["127.0.0.1"]
    return ["127.0.0.1", "[::1]"]


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo model's tokenizer and two small random layers: it starts and answers quickly."""
    from leadline.engine.hub import resolve_model
    from small_model import write_small_model

    return write_small_model(resolve_model("smollm2", progress=False).path, tmp_path_factory.mktemp("small"))


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
