"""Deadlines under one timer."""

from __future__ import annotations

import time

from gateway_rig import until

from leadline.protocol.http.deadlines import Deadlines


class Waiting:
    def __init__(self) -> None:
        self.expired_at: list[float] = []

    def expired(self) -> None:
        self.expired_at.append(time.monotonic())


async def test_each_is_told_once_and_not_before_its_time() -> None:
    deadlines, now = Deadlines(), time.monotonic()
    waiting = {delay: Waiting() for delay in (0.15, 0.05, 0.1, 0.0)}
    for delay, one in waiting.items():
        deadlines.set(one, now + delay)
    await until(lambda: len(deadlines) == 0)
    for delay, one in waiting.items():
        (at,) = one.expired_at
        assert at >= now + delay


async def test_a_later_deadline_takes_the_place_of_an_earlier_one() -> None:
    deadlines, now = Deadlines(), time.monotonic()
    one, other = Waiting(), Waiting()
    deadlines.set(one, now + 0.03)
    deadlines.set(one, now + 0.12)
    deadlines.set(other, now + 0.06)
    await until(lambda: other.expired_at)
    assert not one.expired_at
    await until(lambda: one.expired_at)
    assert one.expired_at[0] >= now + 0.12


async def test_an_earlier_deadline_takes_the_place_of_a_later_one() -> None:
    deadlines, one = Deadlines(), Waiting()
    deadlines.set(one, time.monotonic() + 3600)
    deadlines.set(one, time.monotonic() + 0.02)
    await until(lambda: one.expired_at)


async def test_whoever_is_forgotten_is_not_told() -> None:
    deadlines, one, other = Deadlines(), Waiting(), Waiting()
    deadlines.set(one, time.monotonic() + 0.01)
    deadlines.set(other, time.monotonic() + 0.03)
    deadlines.forget(one)
    await until(lambda: other.expired_at)
    assert not one.expired_at
    assert len(deadlines) == 0


async def test_setting_a_deadline_while_being_told_of_one_works() -> None:
    deadlines = Deadlines()

    class Again(Waiting):
        def expired(self) -> None:
            super().expired()
            if len(self.expired_at) < 3:
                deadlines.set(self, time.monotonic())

    one = Again()
    deadlines.set(one, time.monotonic())
    await until(lambda: len(one.expired_at) == 3)
    deadlines.close()
