"""The further API processes of a server, as the one that the user started sees them.

    first process (API process 0: core, signals, publisher) ─┬─ control ─ worker ─┐
                                                             └─ control ─ worker ─┼─ HTTP, one port
                                                                                  └─ wire ─ engine core

A worker that dies loses its own requests, which the core then drops. Another worker takes its place, unless
they die again and again: then `failed` is set. Counts of a dead worker up to the last request for /metrics
are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from leadline.engine.client.async_engine import AsyncEngine
from leadline.engine.config import EngineConfig
from leadline.engine.errors import EngineDead, LeadlineError
from leadline.engine.models.config import load_model_config
from leadline.engine.models.cost import active_weights
from leadline.engine.server.metrics.exposition import Family, added
from leadline.engine.server.process.control import (
    Begin,
    Channel,
    CoreLost,
    Counts,
    CountsWanted,
    Drain,
    Drained,
    FromWorker,
    Joined,
    Open,
    Page,
    PageWanted,
    Serving,
    Stop,
    ToWorker,
)
from leadline.engine.server.process.listening import LAST_WORDS_SECONDS
from leadline.engine.server.settings import ServerSettings
from leadline.engine.system.cpu_limit import usable_cores

__all__ = ["ApiPool", "default_api_processes"]

logger = logging.getLogger("leadline.engine.server")

_COUNT_SECONDS = 2.0
_DEATHS, _DEATHS_SECONDS = 3, 30.0
"""So many deaths a worker within so many seconds are too many."""


_MOST_BY_DEFAULT = 4
_LARGE_MODEL = 4_000_000_000
"""Weights per token from which on two processes are enough: 256 streams of an 8B model on an H200 get 19k
tokens/s, and one process writes 55k (docs/decisions/018)."""
_GPU_DRIVER = Path("/dev/nvidiactl")


def default_api_processes(config: EngineConfig) -> int:
    """API processes of a server that names no number: 1 on CPU, which the model needs; on a GPU half of the
    cores that the engine's own processes leave, up to 4, or 2 for a large model."""
    if config.device == "cpu" or not _GPU_DRIVER.exists():
        return 1
    most, folder = _MOST_BY_DEFAULT, Path(config.model.removeprefix("file://")).expanduser()
    with contextlib.suppress(LeadlineError, OSError):  # an encoder is no ModelConfig, and small
        if active_weights(load_model_config(folder)) >= _LARGE_MODEL:
            most = 2
    return max(1, min(most, (usable_cores() - config.tensor_parallel) // 2))


class _Worker:
    """One process and its channel."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self.process = process
        self.channel = channel
        self.client = 0
        """Its number at the core; 0 until it has one."""
        self.joined = self.serving = False
        self.counts: list[Family] = []
        self.drained: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._calls = itertools.count()
        self._counting: dict[int, asyncio.Future[None]] = {}

    @classmethod
    async def start(cls) -> _Worker:
        process, here = _spawn()
        return cls(process, await Channel.open(here, FromWorker))

    async def count(self) -> None:
        """Ask for its counts, and have those of before where it takes long."""
        call = next(self._calls)
        answered = self._counting[call] = asyncio.get_running_loop().create_future()
        self.channel.send(CountsWanted(call))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(answered, _COUNT_SECONDS)
        del self._counting[call]

    def counted(self, counts: Counts) -> None:
        self.counts = counts.families
        answered = self._counting.get(counts.call)
        if answered is not None and not answered.done():
            answered.set_result(None)

    async def end(self) -> int:
        """After its channel's end: its exit code."""
        self.joined = self.serving = False
        self.channel.close()
        for answered in self._counting.values():
            if not answered.done():
                answered.set_result(None)
        if not self.drained.done():
            self.drained.set_result(0)
        self.process.kill()  # it may hang without its channel
        return await asyncio.to_thread(self.process.wait)


def _spawn() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A fresh interpreter (never forked: threads do not survive it), and our end of its channel."""
    here, there = socket.socketpair()
    with there:
        command = [sys.executable, "-m", "leadline.engine.server.process.worker", str(there.fileno())]
        process = subprocess.Popen(command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL)
    return process, here


class ApiPool:
    """`failed` resolves with the reason when workers cannot be kept running."""

    def __init__(
        self,
        count: int,
        config: EngineConfig,
        settings: ServerSettings,
        render: Callable[[list[Family]], bytes],
    ) -> None:
        """`settings.port` is the one that is listened on; `render` makes /metrics of what others counted."""
        self._config = config
        self._settings = dataclasses.replace(settings, redis_url=None)
        self._render = render
        self._count = count
        self._workers: dict[int, _Worker] = {}
        """By place."""
        self._retired: list[Family] = []
        self._deaths: list[float] = []
        self._opened = self._ending = False
        self._news = asyncio.Event()
        """Set when a worker is a step further, or none will be."""
        loop = asyncio.get_running_loop()
        self._engine: asyncio.Future[AsyncEngine] = loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed: asyncio.Future[LeadlineError] = loop.create_future()

    def spawn(self) -> None:
        """Start the processes; they wait for an engine."""
        for place in range(self._count):
            self._go(self._keep(place))

    async def begin(self, engine: AsyncEngine) -> None:
        """Have them join it; returns when all have. Raises what keeps them from it."""
        self._engine.set_result(engine)
        engine.dead.add_done_callback(lambda _: self._news.set())
        await self._all(lambda worker: worker.joined)

    async def open(self) -> None:
        """Have them listen; returns when all do. Raises as `begin`."""
        self._opened = True
        self._tell(Open())
        await self._all(lambda worker: worker.serving)

    async def _all(self, condition: Callable[[_Worker], bool]) -> None:
        dead = self._engine.result().dead
        while not (self.failed.done() or dead.done()):
            if len(self._workers) == self._count and all(map(condition, self._workers.values())):
                return
            self._news.clear()
            await self._news.wait()
        raise self.failed.result() if self.failed.done() else dead.result()

    async def page(self) -> bytes:
        """/metrics of the whole server."""
        await asyncio.gather(*(worker.count() for worker in self._joined()))
        parts = [self._retired, *(worker.counts for worker in self._workers.values())]
        return self._render(added(parts))

    async def drain(self, seconds: float) -> int:
        """As `AsyncEngine.drain`, for all of them."""
        self._ending = True
        self._tell(Drain(seconds))
        return sum(await asyncio.gather(*(asyncio.shield(worker.drained) for worker in self._joined())))

    def core_lost(self, reason: str) -> None:
        self._ending = True
        self._tell(CoreLost(reason))

    async def stop(self) -> None:
        """Have them end, and wait for it."""
        self._ending = True
        self._tell(Stop())
        for worker in self._workers.values():
            if not worker.joined:
                worker.process.kill()
        self._engine.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_WORDS_SECONDS + 2)
        for worker in self._workers.values():
            worker.process.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _joined(self) -> list[_Worker]:
        return [worker for worker in self._workers.values() if worker.joined]

    def _tell(self, message: ToWorker) -> None:
        for worker in self._joined():
            worker.channel.send(message)

    def _go(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, place: int) -> None:
        """A worker in this place, and after its death another, until the end."""
        while not (self._ending or self.failed.done()):
            try:
                worker = self._workers[place] = await _Worker.start()
            except OSError as error:
                self._fail(f"an API process cannot be started: {error}")
                return
            try:
                await self._live(worker)
            except Exception:
                logger.exception("a message of an API process could not be handled")
            code = await worker.end()
            del self._workers[place]
            self._retired = added([self._retired, worker.counts])
            if worker.client:
                self._engine.result().detach(worker.client)
            if not self._ending:
                self._note_death(worker, code)

    async def _live(self, worker: _Worker) -> None:
        """Until its end."""
        try:
            engine = await asyncio.shield(self._engine)
            if self._ending:
                return
            member = engine.attach()
        except (asyncio.CancelledError, EngineDead):
            return
        worker.client = member.client
        worker.channel.send(Begin(self._config, self._settings, member))
        async for message in worker.channel.messages():
            self._hear(worker, message)

    def _hear(self, worker: _Worker, message: FromWorker) -> None:
        match message:
            case Joined():
                worker.joined = True
                if self._opened and not self._ending:
                    worker.channel.send(Open())
                self._news.set()
            case Serving():
                worker.serving = True
                self._news.set()
            case Counts():
                worker.counted(message)
            case PageWanted(call):
                self._go(self._answer(worker, call))
            case Drained(aborted):
                if not worker.drained.done():
                    worker.drained.set_result(aborted)

    async def _answer(self, worker: _Worker, call: int) -> None:
        worker.channel.send(Page(call, await self.page()))

    def _note_death(self, worker: _Worker, code: int) -> None:
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if now - at < _DEATHS_SECONDS] + [now]
        how = f"was killed by signal {-code}" if code < 0 else f"left with {code}"
        if len(self._deaths) > _DEATHS * self._count:
            self._fail(f"API processes die again and again; the last {how}")
        else:
            logger.error("API process %d %s; starting another", worker.process.pid, how)

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(EngineDead(reason))
            self._news.set()
