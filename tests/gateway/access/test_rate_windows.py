"""The arithmetic of the sliding minute."""

from hypothesis import assume, given
from hypothesis import strategies as st

from leadline.gateway.access.window import MINUTE, LocalWindows, Usage, wait_for, wait_until_empty

usages = st.builds(
    Usage,
    previous=st.integers(0, 1_000),
    current=st.integers(0, 1_000),
    phase=st.floats(0, 1, exclude_max=True),
)


def later(usage: Usage, seconds: float) -> Usage:
    """The usage after so many seconds without requests."""
    phase = usage.phase + seconds / MINUTE
    if phase < 1:
        return Usage(usage.previous, usage.current, phase)
    return Usage(usage.current, 0, phase - 1) if phase < 2 else Usage(0, 0, 0.0)


@given(usages, st.integers(1, 1_000), st.integers(1, 1_000))
def test_after_the_wait_it_fits_and_not_much_before(usage: Usage, cost: int, limit: int) -> None:
    seconds = wait_for(usage, cost, limit)
    if cost > limit:
        assert seconds is None
        return
    assert seconds is not None
    assert 0 <= seconds <= 2 * MINUTE
    assert later(usage, seconds + 1e-3).fits(cost, limit)
    if seconds > 1:
        assert not later(usage, seconds - 0.5).used + cost <= limit - 1e-6 or usage.used == 0


@given(usages)
def test_the_reset_time_is_when_nothing_is_used(usage: Usage) -> None:
    assert later(usage, wait_until_empty(usage) + 1e-6).used < 0.01
    assume(usage.used > 1)
    assert wait_until_empty(usage) > 0


@given(
    st.lists(st.tuples(st.floats(0, 40), st.integers(1, 10)), min_size=1, max_size=200),
    st.integers(10, 100),
)
def test_no_clock_minute_lets_more_than_the_limit_through(steps: list[tuple[float, int]], limit: int) -> None:
    windows, now = LocalWindows(), 1_000_000.0
    admitted: list[tuple[float, int]] = []
    for pause, cost in steps:
        now += pause
        if windows.usage("k", now)[1].fits(cost, limit):
            windows.add("k", now, 1, cost)
            admitted.append((now, cost))
    by_minute: dict[int, int] = {}
    for when, cost in admitted:
        by_minute[int(when // MINUTE)] = by_minute.get(int(when // MINUTE), 0) + cost
    assert max(by_minute.values(), default=0) <= limit


def test_a_burst_at_the_edge_of_a_minute_cannot_use_two_minutes_worth() -> None:
    windows, edge = LocalWindows(), 60_000.0
    windows.add("k", edge - 1, 100, 0)
    requests, _ = windows.usage("k", edge + 1)
    assert not requests.fits(3, 100)
    assert windows.usage("k", edge + 30)[0].fits(50, 100)
    assert windows.usage("k", edge + 61)[0].used == 0


def test_tokens_given_back_are_taken_off_this_minute_and_then_the_last() -> None:
    windows, edge = LocalWindows(), 60_000.0
    windows.add("k", edge - 1, 1, 100)
    windows.add("k", edge, 1, 10)
    windows.add("k", edge, 0, -50)
    _, tokens = windows.usage("k", edge)
    assert (tokens.previous, tokens.current) == (60, 0)
    windows.add("k", edge, 0, -1_000)
    assert windows.usage("k", edge)[1].used == 0
