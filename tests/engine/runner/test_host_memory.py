"""A KV cache on a CPU takes memory as it fills, and is refused beforehand where it would never fit."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from leadline.engine.errors import OutOfMemory
from leadline.engine.runner.host_memory import lazy_zeros, memory_limit

MIB = 1 << 20


def test_zeros_take_no_memory_before_they_are_written_to() -> None:
    before = psutil.Process().memory_info().rss
    first, second = lazy_zeros([(64, MIB), (64, MIB)], torch.float32)
    assert psutil.Process().memory_info().rss - before < 16 * MIB
    first[3] = 1.5
    assert (first.sum().item(), second[63].abs().max().item()) == (1.5 * MIB, 0.0)
    assert psutil.Process().memory_info().rss - before >= 4 * MIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_odd_shapes_are_aligned_and_apart(dtype: torch.dtype) -> None:
    tensors = lazy_zeros([(3, 5, 7), (1, 1, 1), (2, 2, 11)], dtype)
    assert [tuple(one.shape) for one in tensors] == [(3, 5, 7), (1, 1, 1), (2, 2, 11)]
    assert all(one.data_ptr() % 64 == 0 and one.dtype == dtype for one in tensors)
    for number, one in enumerate(tensors, 1):
        one.view(torch.uint8).fill_(number)
    assert [one.view(torch.uint8).unique().tolist() for one in tensors] == [[1], [2], [3]]


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(OutOfMemory, match=r"takes 128 MiB beside [\d,]+ MiB in use, and 100 MiB are allowed"):
        lazy_zeros([(128, MIB)], torch.uint8, limit=100 * MIB)
    with pytest.raises(OutOfMemory, match="lower cpu_kv_bytes"):
        lazy_zeros([(1 << 20, MIB)], torch.float32)


@pytest.mark.parametrize(
    ("file", "text", "limit"),
    [
        ("memory.max", "1073741824\n", 1 << 30),
        ("memory.max", "max\n", None),
        ("kubepods/pod1/memory.max", "536870912\n", 1 << 29),
        ("memory.max", "garbage\n", None),
    ],
)
def test_the_limit_is_the_containers_or_the_machines(
    file: str, text: str, limit: int | None, tmp_path: Path
) -> None:
    (tmp_path / "membership").write_text("0::/kubepods/pod1/abc\n")
    written = tmp_path / "root" / file
    written.parent.mkdir(parents=True)
    written.write_text(text)
    found = memory_limit(tmp_path / "membership", tmp_path / "root")
    assert found == (psutil.virtual_memory().total if limit is None else limit)


def test_the_limit_of_cgroup_v1_is_read(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("9:memory:/pod1\n")
    folder = tmp_path / "root" / "memory" / "pod1"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("268435456\n")
    (tmp_path / "root" / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_limit(tmp_path / "membership", tmp_path / "root") == 1 << 28
