"""`AsyncEngine` over the scripted core, whose steps take exactly as long as a test wants."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from scripted_core import EXIT, REFUSE, SLEEP, SLOW, STEP

from leadline.engine.client.async_engine import AsyncEngine
from leadline.engine.config import EngineConfig
from leadline.engine.errors import EngineDead, QueueFull, RequestError
from leadline.engine.hub import resolve_model
from leadline.engine.sampling_params import SamplingParams
from leadline.engine.server import ServerSettings, create_app
from leadline.engine.server.api import completions
from leadline.engine.server.http.responses import ApiError
from leadline.engine.server.state import Phase, ServerState
from leadline.protocol.openai import CompletionRequest

COUNT = 50
LONG = SamplingParams(max_tokens=400)


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncEngine]:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", f"{here}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    path = str(resolve_model("smollm2", progress=False).path)
    engine = await AsyncEngine.start(EngineConfig(model=path), factory="scripted_core:build")
    try:
        yield engine
    finally:
        await engine.stop()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what arrives with a heartbeat, which nothing announces."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_closing_the_iterator_frees_the_request_within_two_steps(engine: AsyncEngine) -> None:
    """E11."""
    stream = engine.generate([SLOW], LONG)
    await anext(stream)
    await stream.aclose()
    steps = engine.stats().steps_total
    await until(lambda: engine.stats().running == 0 and engine.stats().steps_total > 0)
    assert engine.num_in_flight == 0
    # The heartbeat before may be half a second old, which is ten of its steps.
    assert engine.stats().steps_total - steps <= 12


async def test_cancelling_the_reader_frees_the_request(engine: AsyncEngine) -> None:
    async def read() -> None:
        async for _ in engine.generate([SLOW], LONG):
            pass

    task = asyncio.ensure_future(read())
    await until(lambda: engine.num_in_flight == 1 and engine.stats().running == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert engine.num_in_flight == 0
    await until(lambda: engine.stats().running == 0)


async def test_a_reader_that_sleeps_holds_up_nobody_and_loses_nothing(engine: AsyncEngine) -> None:
    sleeper = engine.generate([COUNT], LONG)
    first = await anext(sleeper)
    other = [delta async for delta in engine.generate([COUNT], LONG)]
    tokens = first.token_ids + [token async for delta in sleeper for token in delta.token_ids]
    assert len(tokens) == 400
    assert sum(len(delta.token_ids) for delta in other) == 400


async def test_choices_come_back_numbered(engine: AsyncEngine) -> None:
    sampling = SamplingParams(n=3, max_tokens=2)
    finished = [d.index async for d in engine.generate([COUNT], sampling) if d.finish_reason is not None]
    assert sorted(finished) == [0, 1, 2]


async def test_a_refusal_of_the_core_is_raised_with_its_type(engine: AsyncEngine) -> None:
    with pytest.raises(QueueFull) as caught:
        await anext(engine.generate([REFUSE], LONG))
    assert caught.value.retry_after == 7.0
    assert engine.num_in_flight == 0


async def test_a_request_id_in_use_is_refused(engine: AsyncEngine) -> None:
    first = engine.generate([SLOW], LONG, request_id="same")
    await anext(first)
    with pytest.raises(RequestError, match="same"):
        await anext(engine.generate([SLOW], LONG, request_id="same"))
    await first.aclose()


async def test_every_request_in_flight_hears_of_the_cores_death(engine: AsyncEngine) -> None:
    streams = [engine.generate([SLOW], LONG) for _ in range(3)]
    for stream in streams:
        await anext(stream)
    results = asyncio.gather(*(_drain(stream) for stream in streams), return_exceptions=True)
    with pytest.raises(EngineDead):
        await _drain(engine.generate([EXIT], LONG))
    assert all(isinstance(result, EngineDead) for result in await results)
    with pytest.raises(EngineDead):
        engine.check_ready()


async def _drain(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


async def test_a_drain_waits_then_aborts_what_is_left(engine: AsyncEngine) -> None:
    short = asyncio.ensure_future(_drain(engine.generate([SLOW], SamplingParams(max_tokens=4))))
    long = asyncio.ensure_future(_drain(engine.generate([SLOW], LONG)))
    await until(lambda: engine.num_in_flight == 2)
    assert await engine.drain(1.5) == 1
    await short
    with pytest.raises(EngineDead, match="shut down"):
        await long
    with pytest.raises(EngineDead):
        await anext(engine.generate([COUNT], LONG))


async def test_warmup_reports_what_it_did(engine: AsyncEngine) -> None:
    report = await engine.warmup(["Hello there", [COUNT, 51, 52]])
    assert report.prompts == 2
    assert report.prompt_tokens == 3 + len(engine.tokenizer.encode("Hello there"))


async def test_a_loop_that_stands_still_makes_the_server_unready(engine: AsyncEngine) -> None:
    """After `stall_seconds`; a step that takes long is no frozen process, and /health stays 200."""
    app = create_app(engine, ServerSettings(stall_seconds=1.0))
    state: ServerState = app.state.server
    assert state.phase is Phase.SERVING
    assert state.ready() == (True, "ready")
    step = asyncio.ensure_future(_drain(engine.generate([SLEEP], SamplingParams(max_tokens=1))))
    await until(lambda: not state.ready()[0])
    assert "has not moved" in state.ready()[1]
    while not step.done():
        assert engine.frozen is None
        await asyncio.sleep(0.05)
    await until(lambda: state.ready()[0])


async def test_a_frozen_core_makes_the_server_unready_and_unhealthy(engine: AsyncEngine) -> None:
    state: ServerState = create_app(engine, ServerSettings()).state.server
    os.kill(engine.core_pid, signal.SIGSTOP)
    try:
        await until(lambda: not state.ready()[0])
        assert "is stopped by a signal" in state.ready()[1]
        for refused in (state.check_frozen, state.admit):
            with pytest.raises(ApiError) as caught:
                refused()
            assert (caught.value.status, caught.value.code) == (503, "engine_frozen")
            assert "Retry-After" not in caught.value.headers  # a gateway counts it against the pod
    finally:
        os.kill(engine.core_pid, signal.SIGCONT)
    await until(lambda: state.ready()[0])
    state.check_frozen()


async def test_a_core_that_does_not_end_a_step_makes_the_server_unhealthy_until_it_does(
    engine: AsyncEngine,
) -> None:
    state: ServerState = create_app(engine, ServerSettings()).state.server
    one = SamplingParams(max_tokens=1)
    for _ in range(2):
        await _drain(engine.generate([STEP, 0], one))
    step = asyncio.ensure_future(_drain(engine.generate([STEP, 30], one)))
    await until(lambda: not state.ready()[0])
    assert "a step has lasted longer than 1 s" in state.ready()[1]
    assert not step.done()
    await until(lambda: state.ready()[0])
    await step


async def test_many_prompts_of_one_request_leave_the_loop_to_others(engine: AsyncEngine) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(others())
    await completions._prepare(CompletionRequest(prompt=["some words"] * 50), engine)
    task.cancel()
    assert turns >= 49


async def test_bad_words_are_tokenized_once_for_all_prompts_and_many_of_them_in_a_thread(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, found = engine.tokenizer.encode, dict[str, list[threading.Thread]]()

    def noted(text: str, add_special_tokens: bool = True) -> list[int]:
        found.setdefault(text, []).append(threading.current_thread())
        return encode(text, add_special_tokens)

    monkeypatch.setattr(engine.tokenizer, "encode", noted)
    for words, inline in ((["word"], True), (["word" + " w" * 20] * 500, False)):
        found.clear()
        await completions._prepare(CompletionRequest(prompt=["some"] * 3, bad_words=words), engine)
        assert len(found["some"]) == 3
        assert len(found[words[0]]) == len(words)
        assert (found[words[0]][0] is threading.main_thread()) is inline
