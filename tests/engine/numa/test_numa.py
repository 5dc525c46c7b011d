"""NUMA binding against made-up /sys trees, and on this very process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leadline.engine.config import EngineConfig
from leadline.engine.errors import ConfigError
from leadline.engine.system import numa
from leadline.engine.system.numa import _show, choose_cpus, parse_cpulist

GPU = "0000:9b:00.0"
ALL = frozenset(range(16))


def tree(root: Path, nodes: dict[int, str], gpus: dict[str, str] | None = None) -> Path:
    for node, cpus in nodes.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    for address, node_of in (gpus or {}).items():
        folder = root / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(node_of + "\n")
    return root


@pytest.fixture
def two(tmp_path: Path) -> Path:
    return tree(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, {GPU: "1", "0000:1b:00.0": "-1"})


def test_auto_binds_to_the_node_of_the_gpu(two: Path) -> None:
    assert choose_cpus("auto", GPU, ALL, two) == {4, 5, 6, 7, 12, 13, 14, 15}


def test_only_cpus_that_the_process_may_use_count(two: Path) -> None:
    assert choose_cpus("auto", GPU, frozenset({0, 1, 5, 12}), two) == {5, 12}


def test_a_node_may_be_named(two: Path) -> None:
    assert choose_cpus("0", GPU, ALL, two) == {0, 1, 2, 3, 8, 9, 10, 11}


def test_one_node_is_left_alone_with_a_line_in_the_log(tmp_path: Path, caplog) -> None:
    root = tree(tmp_path, {0: "0-15"}, {GPU: "0"})
    with caplog.at_level(logging.INFO, "leadline.engine.system.numa"):
        assert choose_cpus("auto", GPU, ALL, root) is None
    assert "one NUMA node" in caplog.text


@pytest.mark.parametrize(
    ("pci", "says"), [("0000:1b:00.0", "not known"), ("0000:ff:00.0", "not known"), (None, "no GPU")]
)
def test_without_a_known_node_auto_binds_to_nothing(two: Path, caplog, pci, says) -> None:
    with caplog.at_level(logging.INFO, "leadline.engine.system.numa"):
        assert choose_cpus("auto", pci, ALL, two) is None
    assert says in caplog.text


def test_a_container_without_cpus_of_the_node_is_warned_and_left_alone(two: Path, caplog) -> None:
    assert choose_cpus("auto", GPU, frozenset({0, 1}), two) is None
    assert "no CPU of NUMA node 1" in caplog.text
    with pytest.raises(ConfigError, match=r"numa 1: .*no CPU of NUMA node 1 \(cpulist 4-7,12-15\)"):
        choose_cpus("1", None, frozenset({0, 1}), two)


def test_a_node_that_is_not_there_is_refused_with_those_that_are(two: Path) -> None:
    with pytest.raises(ConfigError, match=r"numa 2: .*\[0, 1\]"):
        choose_cpus("2", GPU, ALL, two)


def test_a_node_of_memory_alone_does_not_count(tmp_path: Path) -> None:
    root = tree(tmp_path, {0: "0-15", 1: ""}, {GPU: "0"})
    assert choose_cpus("auto", GPU, ALL, root) is None


def test_a_host_without_sys_is_left_alone(tmp_path: Path) -> None:
    assert choose_cpus("auto", GPU, ALL, tmp_path) is None


@given(st.frozensets(st.integers(0, 300)))
def test_cpulists_are_read_as_they_are_written(cpus: frozenset[int]) -> None:
    assert parse_cpulist(_show(cpus)) == cpus


@pytest.mark.parametrize("value", ["", "on", "-1", "1.5"])
def test_other_values_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="numa"):
        EngineConfig(model="m", numa=value).validate()


def test_a_process_that_may_not_be_bound_runs_on_with_auto_and_fails_with_a_node(
    monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    def forbid(task: int, cpus: frozenset[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", forbid)
    monkeypatch.setattr(numa, "choose_cpus", lambda *_: frozenset({0}))
    assert numa.bind_process("auto", torch.device("cpu")) is None
    assert "numa auto: this process cannot be bound: [Errno 1]" in caplog.text
    with pytest.raises(ConfigError, match="numa 0: this process cannot be bound"):
        numa.bind_process("0", torch.device("cpu"))


def test_every_thread_of_the_process_is_bound() -> None:
    """In a process of its own: this one's affinity stays. The node is the real host's."""
    code = """
import os, threading, torch
from leadline.engine.system.numa import bind_process
stop = threading.Event()
thread = threading.Thread(target=stop.wait); thread.start()
one = {min(os.sched_getaffinity(0))}
os.sched_setaffinity(thread.native_id, one | {max(os.sched_getaffinity(0))})
os.sched_setaffinity(0, one)
cpus = bind_process("0", torch.device("cpu"))
tasks = [int(name) for name in os.listdir("/proc/self/task")]
print(sorted(cpus) == sorted(one), all(os.sched_getaffinity(task) == one for task in tasks))
stop.set()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    if not Path("/sys/devices/system/node/node0/cpulist").exists():
        assert "there is no such node" in done.stderr
        return
    first = min(os.sched_getaffinity(0))
    assert first in parse_cpulist(Path("/sys/devices/system/node/node0/cpulist").read_text())
    assert done.stdout.split() == ["True", "True"], done.stderr
