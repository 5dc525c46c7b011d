"""Which cores count as frozen or hung. The looks are made one after the other, so no time has to pass."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from leadline.engine.system.pulse import LOOK_SECONDS, Pulse, PulseWatch, process_state

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


def looks_until_hung(
    pulse: Pulse, watch: PulseWatch, processes: Processes, state: str, ticks_a_look: int, beats: bool
) -> int | None:
    """None: not within 300 looks."""
    for look in range(300):
        if beats:
            pulse.beat()
        processes.of[os.getpid()] = (state, 100 + look * ticks_a_look)
        if (found := watch.look()) is not None:
            assert "hangs: a step has lasted longer than 12 s" in found
            return look
    return None


@pytest.mark.parametrize(
    ("state", "ticks_a_look", "beats"),
    [
        pytest.param("S", 0, True, id="it waits for a device that does not answer"),
        pytest.param("R", 40, True, id="it computes without end"),
        pytest.param("R", 40, False, id="it computes without end and holds the interpreter's lock"),
        pytest.param("D", 0, True, id="it waits for a disk"),
    ],
)
def test_a_core_that_lives_and_does_not_end_its_step_hangs_until_it_does(
    pulse: Pulse, watch: PulseWatch, processes: Processes, state: str, ticks_a_look: int, beats: bool
) -> None:
    pulse.begin_step(12.0)
    found = looks_until_hung(pulse, watch, processes, state, ticks_a_look, beats)
    assert found == pytest.approx(12.0 / LOOK_SECONDS, abs=1)
    pulse.end_step()
    pulse.beat()
    assert watch.look() is None


def test_a_step_that_is_given_no_processor_does_not_hang(
    pulse: Pulse, watch: PulseWatch, processes: Processes
) -> None:
    pulse.begin_step(12.0)
    assert looks_until_hung(pulse, watch, processes, "R", 3, True) is None


def test_a_step_without_a_bound_may_take_any_time(
    pulse: Pulse, watch: PulseWatch, processes: Processes
) -> None:
    pulse.begin_step(0.0)
    assert looks_until_hung(pulse, watch, processes, "R", 40, True) is None


def test_steps_that_follow_each_other_and_times_between_two_do_not_add_up(
    pulse: Pulse, watch: PulseWatch
) -> None:
    for _ in range(10):
        pulse.begin_step(4.0)
        for _ in range(9):
            pulse.beat()
            assert watch.look() is None
    pulse.end_step()
    for _ in range(100):
        pulse.beat()
        assert watch.look() is None
