"""Which cores count as frozen. The looks are made one after the other, so no time has to pass."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from leadline.engine.pulse import Pulse, PulseWatch, process_state

ENOUGH = 20
"""Looks in a row, more than any verdict needs."""


class Processes:
    """States of processes as the test sets them: pid → (state, CPU time)."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[str, int]] = {}

    def __call__(self, pid: int) -> tuple[str, int] | None:
        return self.of.get(pid)


@pytest.fixture
def processes() -> Processes:
    return Processes()


@pytest.fixture
def pulse(tmp_path: Path) -> Pulse:
    return Pulse(str(tmp_path))


@pytest.fixture
def watch(pulse: Pulse, tmp_path: Path, processes: Processes) -> PulseWatch:
    processes.of[os.getpid()] = ("S", 100)
    return PulseWatch(str(tmp_path), processes)


def test_a_core_whose_count_moves_lives_whatever_else_is_seen_of_it(
    pulse: Pulse, watch: PulseWatch, processes: Processes
) -> None:
    processes.of[os.getpid()] = ("t", 100)  # a tracer holds it at the very moment of each look
    for _ in range(ENOUGH):
        pulse.beat()
        assert watch.look() is None


def test_a_core_that_is_stopped_is_frozen_until_it_goes_on(
    pulse: Pulse, watch: PulseWatch, processes: Processes
) -> None:
    watch.look()
    processes.of[os.getpid()] = ("T", 100)
    assert [watch.look() is None for _ in range(3)] == [True, False, False]
    assert "is stopped by a signal" in str(watch.look())
    processes.of[os.getpid()] = ("S", 100)
    pulse.beat()
    assert watch.look() is None


def test_a_core_that_computes_without_letting_its_threads_run_is_not_frozen(
    watch: PulseWatch, processes: Processes
) -> None:
    for used in range(ENOUGH):
        processes.of[os.getpid()] = ("R", 100 + used)
        assert watch.look() is None


def test_a_core_that_neither_counts_nor_uses_time_is_frozen_in_the_end(watch: PulseWatch) -> None:
    """A frozen cgroup shows no state of its own. Being starved for a second or two is not enough."""
    watch.look()
    verdicts = [watch.look() for _ in range(ENOUGH)]
    assert verdicts[:6] == [None] * 6
    assert "no sign of life" in str(verdicts[6])


def test_a_core_that_is_starved_and_gets_some_time_is_not_frozen(
    watch: PulseWatch, processes: Processes
) -> None:
    for look in range(ENOUGH):
        processes.of[os.getpid()] = ("R", 100 + look // 5)
        assert watch.look() is None


def test_a_rank_that_is_stopped_freezes_the_engine(
    pulse: Pulse, watch: PulseWatch, processes: Processes
) -> None:
    pulse.name([7, 8])
    processes.of |= {7: ("S", 5), 8: ("T", 5)}
    verdicts = []
    for _ in range(3):
        pulse.beat()
        verdicts.append(watch.look())
    assert verdicts[0] is None
    assert "process 8" in str(verdicts[-1])
    processes.of[8] = ("S", 5)
    pulse.beat()
    assert watch.look() is None


def test_a_core_that_has_ended_is_not_frozen(watch: PulseWatch, processes: Processes) -> None:
    processes.of.clear()
    assert [watch.look() for _ in range(ENOUGH)] == [None] * ENOUGH


def test_the_state_of_a_process_can_be_had() -> None:
    state, used = process_state(os.getpid()) or ("", -1)
    assert state in "RS"
    assert used >= 0
    assert process_state(1 << 30) is None
