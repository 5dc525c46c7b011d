"""What people see of long work: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import io

import pytest

from leadline.engine.system.progress import LinePace, progress_bar


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_stage_has_a_line_at_its_beginning_every_ten_seconds_and_at_its_end() -> None:
    clock = Clock()
    pace = LinePace(clock)
    lines = []
    for second in range(36):
        clock.now = 100.0 + second
        share = second / 35
        if pace.due("loading", share):
            lines.append((second, pace.times(share)))
    assert lines == [
        (0, ""),
        (10, " after 10 s, about 25 s left"),
        (20, " after 20 s, about 15 s left"),
        (30, " after 30 s, about 5 s left"),
        (35, " after 35 s"),
    ]
    assert not pace.due("loading", 1.0), "the end is told once"
    assert pace.due("warming", None)
    assert not pace.due("warming", None)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("steps", [1, 1000])
def test_where_there_is_no_terminal_fast_work_has_a_line_at_its_beginning_and_its_end(steps: int) -> None:
    out = io.StringIO()
    with progress_bar(shown=True, out=out, total=steps, desc="requests") as bar:
        for _ in range(steps):
            bar.set_postfix_str("many tok/s", refresh=False)
            bar.update()
    first, last = out.getvalue().splitlines()
    assert first.startswith("requests:   0%")
    assert last.startswith("requests: 100%")
    assert "\r" not in out.getvalue()


def test_a_terminal_has_a_bar_that_is_drawn_again_in_place() -> None:
    out = Terminal()
    with progress_bar(shown=True, out=out, total=2, desc="requests") as bar:
        bar.update(2)
    assert "\r" in out.getvalue()


def test_a_bar_that_is_not_shown_prints_nothing() -> None:
    out = io.StringIO()
    with progress_bar(shown=False, out=out, total=2) as bar:
        bar.update(2)
    assert out.getvalue() == ""
