"""Prompt chunks are bounded by time while interactive requests decode."""

from __future__ import annotations

from core_sim import Loop, request
from hypothesis import given
from hypothesis import strategies as st

from leadline.engine.core.plan import StepPlan
from leadline.engine.core.planning import LEAST_TOKENS, StepTime

ATTENTION = 5e-5
"""About that of an 8B model: 20,000 keys cost as much as one token's products."""


@given(
    start=st.integers(0, 200_000),
    work=st.floats(0, 1e6),
    attention=st.sampled_from([0.0, 1e-6, ATTENTION, 1e-3]),
)
def test_the_tokens_that_fit_are_the_most_whose_work_is_allowed(
    start: int, work: float, attention: float
) -> None:
    step_time = StepTime(0.05, attention)
    count = step_time.tokens(start, work)
    assert step_time.work(start, count) <= work * (1 + 1e-9)
    assert step_time.work(start, count + 2) > work


class Device:
    """Seconds of a step. Keys cost twice what the model's shape says."""

    decode, pace, attention = 0.005, 24e-6, 2 * ATTENTION

    def seconds(self, plan: StepPlan) -> float:
        chunks = [row for row in plan.rows if row.count > 1]
        work = sum(row.count * (1 + self.attention * (row.start + row.count / 2)) for row in chunks)
        return self.decode + self.pace * work


def run(milliseconds: float, stream_class: str, prompt: int = 60_000) -> tuple[list[float], int]:
    """Seconds of the steps that compute a long prompt beside four streams, and the steps it took."""
    loop = Loop(
        2000,
        block_size=64,
        max_model_len=100_000,
        max_num_batched_tokens=8192,
        prefill_step_seconds=milliseconds / 1000,
        attention_work=ATTENTION,
    )
    device = Device()
    for number in range(4):
        loop.add(request(f"stream{number}", [number, 1, 2], max_tokens=5000, priority_class=stream_class))
    for _ in range(20):
        plan = loop.step()
        loop.scheduler.observe(plan, device.seconds(plan))
    loop.add(request("long", [3] * prompt, max_tokens=1))
    times: list[float] = []
    while "long" not in loop.final:
        plan = loop.step()
        times.append(device.seconds(plan))
        loop.scheduler.observe(plan, times[-1])
    return times, len(times)


def test_steps_of_a_long_prompt_keep_to_the_time_however_long_its_context_grows() -> None:
    times, _ = run(50, "interactive")
    assert max(times) <= 0.060
    settled = times[10:-2]
    assert sum(settled) / len(settled) > 0.042, "the time is used"


def test_without_a_bound_a_step_takes_the_whole_token_budget() -> None:
    times, steps = run(0, "interactive")
    assert steps <= 9
    assert max(times) > 0.2


def test_streams_of_class_batch_do_not_hold_a_prompt_back() -> None:
    assert run(50, "batch")[1] == run(0, "batch")[1]


def test_a_time_that_no_step_can_keep_lets_prompts_make_progress() -> None:
    times, steps = run(1, "interactive", prompt=6_000)
    assert steps <= 6_000 // LEAST_TOKENS + 2
    assert times
