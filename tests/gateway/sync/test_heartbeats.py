"""Which reports are new, and when a pod is silent. Times are made up."""

from __future__ import annotations

from leadline.gateway.sync.heartbeats import Heartbeats
from leadline.protocol.load import LoadReport, encode_report

WALL = 1_800_000_000.0


def report(pod: str = "a", time: float = WALL, epoch: str = "e") -> bytes:
    return encode_report(LoadReport(pod=pod, address="h:1", epoch=epoch, time=time, model="m", block_size=16))


def read(heartbeats: Heartbeats, now: float, **fields: bytes) -> tuple[list[float], list[str], list[str]]:
    news = heartbeats.read({key.encode(): value for key, value in fields.items()}, now, WALL + now)
    return [item.time - WALL for item in news.reports], news.silent, news.dead


def test_a_report_is_news_once() -> None:
    heartbeats = Heartbeats()
    assert read(heartbeats, 0, a=report()) == ([0], [], [])
    assert read(heartbeats, 1, a=report()) == ([], [], [])
    assert read(heartbeats, 2, a=report(time=WALL + 2)) == ([2], [], [])


def test_an_unchanged_report_falls_silent_and_a_change_revives_it() -> None:
    heartbeats = Heartbeats(silent_after=10)
    read(heartbeats, 0, a=report())
    assert read(heartbeats, 9, a=report()) == ([], [], [])
    assert read(heartbeats, 10, a=report()) == ([], ["a"], [])
    assert read(heartbeats, 11, a=report()) == ([], [], [])
    assert read(heartbeats, 12, a=report(time=WALL + 12)) == ([12], [], [])


def test_a_report_left_by_a_dead_pod_is_no_news_until_it_changes() -> None:
    heartbeats = Heartbeats(silent_after=10, forget_after=60)
    old = report(time=WALL - 1_000)
    assert read(heartbeats, 0, a=old) == ([], [], [])
    assert read(heartbeats, 30, a=old) == ([], [], [])
    # Its clock is off, but it lives.
    assert read(heartbeats, 31, a=report(time=WALL - 969)) == ([-969], [], [])


def test_the_field_of_a_dead_pod_is_to_be_deleted() -> None:
    heartbeats = Heartbeats(silent_after=10, forget_after=60)
    old = report(time=WALL - 1_000)
    read(heartbeats, 0, a=old)
    assert read(heartbeats, 60, a=old) == ([], [], ["a"])


def test_a_pod_that_signed_off_is_silent_soon_and_a_flush_is_survived() -> None:
    heartbeats = Heartbeats(missing_after=3)
    read(heartbeats, 0, a=report(), b=report("b"))
    assert read(heartbeats, 1, b=report("b")) == ([], [], [])
    assert read(heartbeats, 3, a=report(time=WALL + 3), b=report("b")) == ([3], [], [])
    assert read(heartbeats, 4, b=report("b")) == ([], [], [])
    assert read(heartbeats, 7, b=report("b")) == ([], ["a"], [])
    assert read(heartbeats, 8, b=report("b")) == ([], [], [])


def test_the_time_in_which_nothing_could_be_read_is_nobodys_silence() -> None:
    heartbeats = Heartbeats(silent_after=10, missing_after=3)
    read(heartbeats, 0, a=report(), b=report("b"))
    read(heartbeats, 1, a=report())
    heartbeats.resumed(100)
    assert read(heartbeats, 100, a=report()) == ([], [], [])
    assert read(heartbeats, 103, a=report()) == ([], ["b"], [])
    assert read(heartbeats, 110, a=report()) == ([], ["a"], [])


def test_garbage_is_a_pod_that_is_not_there() -> None:
    heartbeats = Heartbeats()
    assert read(heartbeats, 0, a=b"\xc1") == ([], [], [])
    assert read(heartbeats, 1, a=report(time=WALL + 1)) == ([1], [], [])
    assert read(heartbeats, 2, a=b"garbage") == ([], ["a"], [])
    assert read(heartbeats, 3, a=report(time=WALL + 3)) == ([3], [], [])
