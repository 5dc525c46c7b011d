"""How long a step may take. The clock is the test's."""

from __future__ import annotations

from itertools import count

import pytest

from leadline.engine.core.plan import StepPlan, StepRow
from leadline.engine.core_process.step_bounds import StepBounds

_step_ids = count()


class Core:
    """Runs steps of the durations that a test gives; `allowed` is the bound of the latest one."""

    def __init__(self) -> None:
        self.now, self.allowed, self.ended = 1000.0, -1.0, 0
        self.bounds = StepBounds(self._begin, self._end, lambda: self.now)

    def _begin(self, seconds: float) -> None:
        self.allowed = seconds

    def _end(self) -> None:
        self.ended += 1

    def step(self, plan: StepPlan, seconds: float) -> float:
        """Run one; return the bound that it had."""
        self.bounds.enter(plan)
        allowed = self.allowed
        self.now += seconds
        self.bounds.leave()
        return allowed


def decode(sequences: int, context: int = 100) -> StepPlan:
    plan = StepPlan(next(_step_ids))
    plan.rows = [StepRow(slot, context, 1, True) for slot in range(sequences)]
    return plan


def prompt(tokens: int, start: int = 0, decoding: int = 0) -> StepPlan:
    plan = decode(decoding)
    plan.rows.append(StepRow(decoding, start, tokens, True))
    return plan


def test_the_first_step_of_a_size_may_take_any_time() -> None:
    core = Core()
    assert core.step(decode(1), 60.0) == 0.0
    assert core.step(decode(16), 60.0) == 0.0
    assert core.step(prompt(500), 60.0) == 0.0


def test_short_steps_may_take_ten_seconds_and_long_ones_twenty_times_as_long() -> None:
    core = Core()
    for _ in range(3):
        core.step(decode(8), 0.03)
        core.step(prompt(8000), 2.0)
    assert core.step(decode(8), 0.03) == 10.0
    assert core.step(prompt(8000), 2.0) == pytest.approx(40.0, rel=0.01)


def test_a_first_step_that_compiled_is_forgotten_with_the_second() -> None:
    core = Core()
    core.step(decode(8), 40.0)
    assert core.step(decode(8), 0.03) == pytest.approx(800.0)
    assert core.step(decode(8), 0.03) == 10.0


def test_a_step_that_hung_and_went_on_does_not_allow_the_next_to_hang_as_long() -> None:
    core = Core()
    for _ in range(3):
        core.step(decode(8), 0.03)
    core.step(decode(8), 300.0)
    assert core.step(decode(8), 0.03) == 10.0


def test_steps_that_become_longer_are_allowed_soon_and_forgotten_in_the_end() -> None:
    core = Core()
    for _ in range(3):
        core.step(decode(8), 0.03)
    bounds = [core.step(decode(8), 12.0) for _ in range(8)]
    assert bounds[:3] == pytest.approx([10.0, 10.0, 20.0])
    assert bounds[-1] == pytest.approx(240.0)
    for _ in range(5000):
        core.step(decode(8), 0.03)
    assert core.step(decode(8), 0.03) == 10.0


def test_a_chunk_deep_in_the_context_is_not_measured_by_one_at_its_beginning() -> None:
    core = Core()
    for _ in range(3):
        core.step(prompt(1000), 0.5)
    assert core.step(prompt(1000, start=100_000), 20.0) == 0.0
    assert core.step(prompt(1000, decoding=20), 0.5) == pytest.approx(10.0)


def test_a_step_that_is_launched_and_then_awaited_is_bounded_anew_at_each() -> None:
    """With overlap another step is read in between."""
    core = Core()
    core.step(decode(8), 0.03)
    core.step(decode(8), 0.03)
    for plan in (decode(8), prompt(500), decode(8)):
        core.bounds.enter(plan)
        core.now += 0.02
    assert core.allowed == 10.0
    core.bounds.leave()
    core.now += 3600.0
    core.bounds.leave()
    assert core.step(decode(8), 0.03) == 10.0


def test_a_launch_that_computes_the_step_is_not_measured_by_the_short_wait_behind_it() -> None:
    core = Core()
    bounds = []
    for _ in range(4):
        plan = prompt(2000)
        core.bounds.enter(plan)
        bounds.append(core.allowed)
        core.now += 15.0
        core.bounds.enter(plan)
        core.now += 0.001
        core.bounds.leave()
    assert bounds == pytest.approx([0.0, 300.0, 300.0, 300.0], rel=0.01)
