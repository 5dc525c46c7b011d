"""A request's deltas reach its reader once and in order, by its on_delta or by its queue."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.engine.client.streams import Stream
from leadline.engine.errors import EngineDead
from leadline.engine.outputs import OutputDelta


class Reader:
    """Reads one stream of one choice in a task, and notes what it got and how."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.taken: list[int] = []
        self.accepts = True
        self.gate = asyncio.Event()
        self.gate.set()
        self.stream = Stream("r", [None], 1, on_delta=self._take)  # type: ignore[list-item]
        self.task = asyncio.ensure_future(self._read())

    def _take(self, delta: OutputDelta) -> bool:
        if self.accepts:
            self.seen += delta.token_ids
            self.taken += delta.token_ids
        return self.accepts

    async def _read(self) -> None:
        async for delta in self.stream.deltas():
            self.seen += delta.token_ids
            await self.gate.wait()

    def put(self, number: int, finish: bool = False) -> None:
        self.stream.put(OutputDelta("r", 0, token_ids=[number], finish_reason="length" if finish else None))


async def turns() -> None:
    """Long enough for every task that can run to come to a wait."""
    for _ in range(4):
        await asyncio.sleep(0)


async def test_a_waiting_reader_takes_deltas_on_the_spot_except_the_last() -> None:
    reader = Reader()
    await turns()
    for number in range(5):
        reader.put(number, finish=number == 4)
    await reader.task
    assert reader.seen == [0, 1, 2, 3, 4]
    assert reader.taken == [0, 1, 2, 3]


async def test_a_reader_that_is_busy_with_a_delta_is_not_overtaken() -> None:
    reader = Reader()
    await turns()
    reader.accepts = False
    reader.gate.clear()
    reader.put(0)
    reader.accepts = True
    await turns()
    assert reader.seen == [0]
    reader.put(1)
    assert reader.seen == [0]
    reader.gate.set()
    await turns()
    reader.put(2)
    reader.put(3, finish=True)
    await reader.task
    assert reader.seen == [0, 1, 2, 3]
    assert reader.taken == [2]


async def test_a_taker_that_fails_ends_its_own_stream_only() -> None:
    def broken(delta: OutputDelta) -> bool:
        raise ZeroDivisionError("a bug in the reader")

    reader = Reader()
    reader.stream.on_delta = broken
    await turns()
    reader.put(0)
    with pytest.raises(ZeroDivisionError):
        await reader.task


async def test_an_error_comes_behind_what_was_taken() -> None:
    reader = Reader()
    await turns()
    reader.put(0)
    reader.stream.fail(EngineDead("gone"))
    reader.put(1)
    with pytest.raises(EngineDead):
        await reader.task
    assert reader.seen == [0, 1]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["put", "turns", "accept", "decline", "hold", "go"]), max_size=60))
def test_no_order_of_events_loses_doubles_or_swaps_a_delta(actions: list[str]) -> None:
    async def play() -> None:
        reader, number = Reader(), 0
        for action in actions:
            match action:
                case "put":
                    reader.put(number)
                    number += 1
                case "turns":
                    await turns()
                case "accept" | "decline":
                    reader.accepts = action == "accept"
                case "hold":
                    reader.gate.clear()
                case "go":
                    reader.gate.set()
        reader.gate.set()
        reader.put(number, finish=True)
        await asyncio.wait_for(reader.task, 10)
        assert reader.seen == list(range(number + 1))

    asyncio.run(play())
