"""A container's CPU limit is a quota of time: it bounds the threads that compute."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from leadline.engine.system import cpu_limit as cores
from leadline.engine.system.cpu_limit import cpu_quota, usable_cores


def quota(tmp_path: Path, membership: str, files: dict[str, str]) -> float | None:
    (tmp_path / "membership").write_text(membership)
    for name, content in files.items():
        file = tmp_path / "root" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return cpu_quota(tmp_path / "membership", tmp_path / "root")


POD = "kubepods/burstable/pod1/abc"


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        pytest.param(
            "0::/\n", {"cpu.max": "200000 100000\n"}, 2.0, id="a container with a namespace of its own"
        ),
        pytest.param("0::/\n", {"cpu.max": "max 100000\n"}, None, id="no limit"),
        pytest.param("0::/\n", {}, None, id="the root of a host has no file"),
        pytest.param("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5, id="half a core"),
        pytest.param(f"0::/{POD}\n", {f"{POD}/cpu.max": "150000 100000\n"}, 1.5, id="seen from the host"),
        pytest.param(
            f"0::/{POD}\n",
            {f"{POD}/cpu.max": "max 100000\n", "kubepods/burstable/pod1/cpu.max": "300000 100000\n"},
            3.0,
            id="the limit of the pod above the container",
        ),
        pytest.param(
            f"0::/{POD}\n", {"cpu.max": "400000 100000\n"}, 4.0, id="only the container's own is mounted"
        ),
        pytest.param(
            f"12:cpuset:/\n4:cpu,cpuacct:/{POD}\n0::/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            2.5,
            id="cgroup v1",
        ),
        pytest.param(
            "4:cpu,cpuacct:/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            None,
            id="cgroup v1 without a limit",
        ),
        pytest.param("0::/\n", {"cpu.max": "garbage\n"}, None, id="what cannot be read limits nothing"),
    ],
)
def test_the_quota_of_a_cgroup(
    tmp_path: Path, membership: str, files: dict[str, str], expected: float | None
) -> None:
    assert quota(tmp_path, membership, files) == expected


def test_without_cgroups_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "nothing", tmp_path) is None


@pytest.mark.parametrize(("granted", "expected"), [(None, 3), (64.0, 3), (2.9, 2), (0.5, 1)])
def test_threads_are_the_whole_cores_of_the_quota_and_one_at_least(
    monkeypatch: pytest.MonkeyPatch, granted: float | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(cores, "cpu_quota", lambda: granted)
    assert usable_cores() == expected
