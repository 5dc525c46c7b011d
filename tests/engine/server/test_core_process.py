"""The process around an engine core: messages, errors, and death of either side."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from leadline.engine import wire
from leadline.engine.client.core_client import CoreClient, CoreLink
from leadline.engine.config import EngineConfig
from leadline.engine.errors import ConfigError, EngineDead, OutOfMemory
from leadline.engine.messages import CoreOutput, CoreRequest
from leadline.engine.sampling_params import SamplingParams

FACTORY = "scripted_core:build"
HERE = Path(__file__).parent
COUNT, CRASH, EXIT, SLOW, REFUSE = 50, 40_001, 40_002, 40_003, 40_004


@pytest.fixture(autouse=True)
def _core_process_finds_the_scripted_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


class Inbox:
    """Collects what a client hears, and waits for it."""

    def __init__(self) -> None:
        self.messages: list[wire.FromCore] = []
        self._news = asyncio.Event()

    def __call__(self, message: wire.FromCore) -> None:
        self.messages.append(message)
        self._news.set()

    async def until(self, condition: Callable[[list[wire.FromCore]], object]) -> None:
        async with asyncio.timeout(20):
            while not condition(self.messages):
                self._news.clear()
                await self._news.wait()

    async def until_true(self, condition: Callable[[], object]) -> None:
        """For what no message here tells."""
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def tokens(self, request_id: str) -> list[int]:
        return [
            token
            for output in self.outputs()
            if output.request_id == request_id
            for token in output.new_token_ids
        ]

    def outputs(self) -> list[CoreOutput]:
        return [o for m in self.messages if isinstance(m, wire.Outputs) for o in m.outputs]

    def finished(self) -> set[str]:
        return {o.request_id for o in self.outputs() if o.finish_reason is not None}


@asynccontextmanager
async def running(model: str = "/nowhere") -> AsyncIterator[tuple[CoreClient, Inbox]]:
    inbox = Inbox()
    client = await CoreClient.start(EngineConfig(model=model), on_message=inbox, factory=FACTORY)
    try:
        await asyncio.wait_for(client.ready, 20)
        yield client, inbox
    finally:
        await client.stop()


def request(request_id: str, first: int = COUNT, max_tokens: int = 4) -> CoreRequest:
    return CoreRequest(
        request_id=request_id,
        prompt_token_ids=[first, 51],
        sampling=SamplingParams(max_tokens=max_tokens),
        seed=0,
        arrival=time.monotonic(),
    )


async def test_a_request_crosses_to_the_core_and_its_tokens_come_back() -> None:
    async with running() as (client, inbox):
        client.send(wire.Add([request("a"), request("b", max_tokens=2)]))
        await inbox.until(lambda _: inbox.finished() == {"a", "b"})
        assert inbox.tokens("a") == [100, 101, 102, 103]
        assert inbox.tokens("b") == [100, 101]


async def test_one_step_makes_one_message_for_all_requests() -> None:
    async with running() as (client, inbox):
        client.send(wire.Add([request("a"), request("b")]))
        await inbox.until(lambda _: inbox.finished() == {"a", "b"})
        steps = [m for m in inbox.messages if isinstance(m, wire.Outputs)]
        assert len(steps) == 4
        assert all(len(step.outputs) == 2 for step in steps)


async def test_an_aborted_request_says_no_more() -> None:
    async with running() as (client, inbox):
        client.send(wire.Add([request("a", SLOW, max_tokens=1000)]))
        await inbox.until(lambda _: inbox.tokens("a"))
        client.send(wire.Abort(["a"]))
        client.send(wire.Add([request("b")]))
        await inbox.until(lambda _: "b" in inbox.finished())
        count = len(inbox.tokens("a"))
        client.send(wire.Add([request("c")]))
        await inbox.until(lambda _: "c" in inbox.finished())
        assert len(inbox.tokens("a")) == count < 1000


async def test_a_refusal_keeps_its_type_and_retry_after() -> None:
    async with running() as (client, inbox):
        client.send(wire.Add([request("a", REFUSE)]))
        await inbox.until(lambda messages: any(isinstance(m, wire.Rejected) for m in messages))
        (refusal,) = [m for m in inbox.messages if isinstance(m, wire.Rejected)]
        assert (refusal.request_id, refusal.kind, refusal.retry_after) == ("a", "QueueFull", 7.0)


async def test_calls_are_answered() -> None:
    async with running() as (client, _):
        assert await asyncio.wait_for(client.reset_prefix_cache(), 10) == 3


async def test_an_idle_core_keeps_its_heartbeat_young_without_spinning() -> None:
    async with running() as (client, _):
        core = psutil.Process(client.pid)
        before, began, beats = core.cpu_times(), time.monotonic(), set()
        while time.monotonic() - began < 2.5:
            beats.add(client.last_heartbeat)
            await asyncio.sleep(0.05)
        after = core.cpu_times()
        assert len(beats) >= 4
        assert (after.user + after.system) - (before.user + before.system) < 0.25


@asynccontextmanager
async def joined(client: CoreClient) -> AsyncIterator[tuple[CoreLink, Inbox]]:
    """Another API process's link to the core of `client`."""
    inbox = Inbox()
    link = CoreLink(client.directory, client.attach(), on_message=inbox)
    link.listen()
    try:
        await asyncio.wait_for(link.heartbeat(), 20)
        yield link, inbox
    finally:
        await link.stop()


async def test_each_api_process_hears_of_its_own_requests_and_calls_alone() -> None:
    async with running() as (client, first), joined(client) as (link, second):
        client.add([request("a"), request("b", max_tokens=2)])
        link.add([request("c"), request("d", REFUSE)])
        await first.until(lambda _: first.finished() == {"a", "b"})
        await second.until(lambda _: second.finished() == {"c"})
        assert first.tokens("a") == second.tokens("c") == [100, 101, 102, 103]
        assert not any(isinstance(message, wire.Rejected) for message in first.messages)
        (refusal,) = [message for message in second.messages if isinstance(message, wire.Rejected)]
        assert refusal.request_id == "d"
        calls = asyncio.gather(client.reset_prefix_cache(), link.reset_prefix_cache())
        assert await asyncio.wait_for(calls, 10) == [3, 3]
        assert (await asyncio.wait_for(link.profile(1, None), 10)).code == "profiling_off"


async def test_the_requests_of_a_detached_api_process_end() -> None:
    async with running() as (client, first):
        async with joined(client) as (link, second):
            link.add([request("a", SLOW, max_tokens=1000)])
            await second.until(lambda _: second.tokens("a"))
        client.detach(link.client)
        client.add([request("b", SLOW, max_tokens=3)])
        await first.until(lambda _: "b" in first.finished())
        assert client.last_stats is not None
        await first.until_true(lambda: client.last_stats.running == 0)
        assert first.tokens("a") == []


async def test_what_a_detached_api_process_sent_late_is_not_begun() -> None:
    async with running() as (client, first), joined(client) as (link, second):
        client.detach(link.client)
        assert await asyncio.wait_for(client.reset_prefix_cache(), 10) == 3  # the core has read it
        link.add([request("a")])
        client.add([request("b")])
        await first.until(lambda _: "b" in first.finished())
        assert not second.outputs()
        assert first.finished() == {"b"}


async def test_start_up_progress_is_relayed() -> None:
    async with running() as (client, inbox):
        assert client.resolved.result().path == "/nowhere"
        assert wire.Progress("loading", 0.5, "half of it") in inbox.messages


async def test_a_configuration_error_arrives_as_itself() -> None:
    client = await CoreClient.start(
        EngineConfig(model="unsupported"), on_message=lambda _: None, factory=FACTORY
    )
    try:
        with pytest.raises(ConfigError, match="int3 is not a thing"):
            await asyncio.wait_for(client.ready, 20)
    finally:
        await client.stop()


async def test_a_model_that_does_not_fit_into_memory_is_said_to_be_too_large() -> None:
    client = await CoreClient.start(EngineConfig(model="large"), on_message=lambda _: None, factory=FACTORY)
    try:
        with pytest.raises(OutOfMemory, match=r"you tried to allocate \d+ bytes.* Serve a smaller model"):
            await asyncio.wait_for(client.ready, 60)
    finally:
        await client.stop()


async def test_a_bug_while_loading_is_an_engine_error_in_one_line() -> None:
    client = await CoreClient.start(EngineConfig(model="broken"), on_message=lambda _: None, factory=FACTORY)
    try:
        with pytest.raises(EngineDead, match=r"ZeroDivisionError: a bug while loading\Z"):
            await asyncio.wait_for(client.ready, 20)
    finally:
        await client.stop()


@pytest.mark.parametrize(("first", "reason"), [(CRASH, "a bug in the core"), (EXIT, "exited with code 9")])
async def test_a_core_that_breaks_is_noticed_with_its_reason(first: int, reason: str) -> None:
    async with running() as (client, _):
        client.send(wire.Add([request("a", first)]))
        error = await asyncio.wait_for(asyncio.shield(client.dead), 10)
        assert reason in str(error)
        with pytest.raises(EngineDead):
            client.send(wire.Add([request("b")]))


async def test_a_killed_core_is_noticed_within_a_second() -> None:
    async with running() as (client, _):
        killed = time.monotonic()
        os.kill(client.pid, signal.SIGKILL)
        error = await asyncio.wait_for(asyncio.shield(client.dead), 10)
        assert time.monotonic() - killed < 1.0
        assert "killed by signal 9 (by the kernel, because memory ran out?)" in str(error)


async def test_calls_in_flight_fail_when_the_core_dies() -> None:
    async with running() as (client, _):
        os.kill(client.pid, signal.SIGSTOP)
        call = asyncio.ensure_future(client.reset_prefix_cache())
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDead):
            await asyncio.wait_for(call, 10)


async def test_sockets_are_private_and_go_with_the_engine() -> None:
    async with running() as (client, _):
        directory = client.directory
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    with pytest.raises(FileNotFoundError):
        os.stat(directory)


async def test_two_engines_share_a_host() -> None:
    async with running() as (one, inbox_one), running() as (two, inbox_two):
        assert one.directory != two.directory
        one.send(wire.Add([request("a")]))
        two.send(wire.Add([request("b")]))
        await inbox_one.until(lambda _: inbox_one.finished() == {"a"})
        await inbox_two.until(lambda _: inbox_two.finished() == {"b"})


def test_the_core_leaves_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
                import asyncio
                from leadline.engine.config import EngineConfig
                from leadline.engine.client.core_client import CoreClient

                async def main():
                    client = await CoreClient.start(
                        EngineConfig(model="x"), on_message=lambda _: None, factory="{FACTORY}"
                    )
                    await client.ready
                    print(client.pid, client.directory, flush=True)
                    await asyncio.Event().wait()

                asyncio.run(main())
            """),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid, directory = parent.stdout.readline().split()
    core = psutil.Process(int(pid))
    parent.kill()
    parent.wait(10)
    core.wait(10)  # raises TimeoutExpired if it lives on
    assert not Path(directory).exists()
