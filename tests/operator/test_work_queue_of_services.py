"""The queue: once each, never twice at a time, later after failures."""

from __future__ import annotations

import asyncio

from leadline.operator.kube.queue import WorkQueue

A, B = ("team", "a"), ("team", "b")


async def test_what_is_added_twice_is_taken_once() -> None:
    queue = WorkQueue()
    for key in (A, B, A):
        queue.add(key)
    assert [await queue.take(), await queue.take()] == [A, B]
    assert len(queue) == 0


async def test_what_is_added_while_it_is_worked_on_comes_back_afterwards_and_not_before() -> None:
    queue = WorkQueue()
    queue.add(A)
    await queue.take()
    queue.add(A)
    queue.add(B)
    assert await queue.take() == B
    queue.done(A)
    assert await queue.take() == A


async def test_of_two_appointments_the_earlier_stands() -> None:
    queue = WorkQueue()
    queue.add_after(A, 60)
    queue.add_after(A, 0)
    queue.add_after(A, 60)
    assert await asyncio.wait_for(queue.take(), 5) == A
    assert not queue._timers


async def test_failures_come_back_later_and_later_and_success_forgets_them() -> None:
    queue = WorkQueue()
    assert [queue.failed(A) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    queue.succeeded(A)
    assert queue.failed(A) == 0.5
    assert queue.failed(B, slowly=True) == 60
    queue.clear()
    assert not queue._timers
