"""One server from its first log line to its exit code: the process that the user started.

The socket listens before the model is loaded: /health answers, /ready and the API answer 503 with
the progress. SIGTERM (or Ctrl-C) drains; a second one leaves at once. The process ends with 0 after a drain,
1 when the engine could not start or its core died, so that its supervisor starts it again. With
`api_processes` above 1 this one is API process 0, and a `pool` keeps the others.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import time
from typing import Any

import uvloop

from leadline.engine import wire
from leadline.engine.client.async_engine import AsyncEngine
from leadline.engine.client.core_client import DEFAULT_FACTORY
from leadline.engine.config import EngineConfig
from leadline.engine.errors import EngineDead, LeadlineError
from leadline.engine.publisher.publisher import Publisher
from leadline.engine.server.app import create_app
from leadline.engine.server.process.listening import address_of, http_server, listen_first, settle_garbage
from leadline.engine.server.process.logs import configure_logging
from leadline.engine.server.process.pool import ApiPool, default_api_processes
from leadline.engine.server.process.publishing import announce, publisher_of
from leadline.engine.server.settings import ServerSettings
from leadline.engine.server.state import DRAINING, Phase, ServerState
from leadline.engine.system.progress import LinePace
from leadline.protocol.openai.service import StartProgress

__all__ = ["ProgressLog", "serve"]

logger = logging.getLogger("leadline.engine.server")


def serve(config: EngineConfig, settings: ServerSettings, *, factory: str = DEFAULT_FACTORY) -> int:
    """Serve until told to stop; returns the exit code. Raises LeadlineError for what kept it from
    starting. `factory` names another core than the real one, for tests and benchmarks."""
    config.validate()
    if settings.api_processes is None:
        settings = dataclasses.replace(settings, api_processes=default_api_processes(config))
    configure_logging(settings.log_level, settings.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Process(config, settings, factory).run())


class _Process:
    def __init__(self, config: EngineConfig, settings: ServerSettings, factory: str) -> None:
        self._factory = factory
        self._config = config
        self._settings = settings
        self._stop = asyncio.Event()
        self._signals = 0
        self._publisher: Publisher | None = None
        self._pool: ApiPool | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        settings, processes = self._settings, self._settings.api_processes or 1
        shared = processes > 1
        listener = listen_first(settings.host, settings.port, shared=shared)
        self._publisher = publisher_of(settings, listener)
        app = create_app(None, settings)
        state: ServerState = app.state.server
        server = http_server(app, settings)
        http = asyncio.create_task(server.serve(sockets=[listener]), name="http")
        if shared:
            bound = dataclasses.replace(settings, port=listener.getsockname()[1])
            self._pool = ApiPool(processes - 1, self._config, bound, state.metrics.render)
            state.page = self._pool.page
            self._pool.spawn()
        try:
            return await self._live(state, http, address_of(listener))
        finally:
            if self._publisher is not None:
                await self._publisher.stop()
            server.should_exit = True
            await asyncio.gather(http, *([] if self._pool is None else [self._pool.stop()]))
            if state.engine is not None:
                await state.engine.stop()

    async def _live(self, state: ServerState, http: asyncio.Task[None], address: str) -> int:
        stop: asyncio.Future[Any] = asyncio.create_task(self._stop.wait())
        starting = asyncio.create_task(self._start_engine(state))
        await asyncio.wait({starting, stop, http}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            logger.info("stopped while starting")
            return 0 if self._stop.is_set() else 1
        try:
            engine = starting.result()
        except LeadlineError as error:
            state.phase, state.detail = Phase.FAILED, str(error)
            raise
        settle_garbage()
        if self._pool is not None:
            await self._pool.open()
        print(f"Leadline serving {engine.served_name} at {address}", flush=True)
        ends: set[asyncio.Future[Any]] = {engine.dead, stop, http}
        if self._pool is not None:
            ends.add(self._pool.failed)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if engine.dead.done():
            state.phase, state.detail = Phase.FAILED, str(engine.dead.result())
            if self._pool is not None:
                self._pool.core_lost(state.detail)
            logger.error("engine core lost: %s; leaving so that it can be started again", state.detail)
            raise EngineDead(state.detail)
        if self._pool is not None and self._pool.failed.done():
            state.phase, state.detail = Phase.FAILED, str(self._pool.failed.result())
            raise self._pool.failed.result()
        if not self._stop.is_set():
            return 1
        return await self._drain(state, engine)

    async def _start_engine(self, state: ServerState) -> AsyncEngine:
        began = time.monotonic()
        progress = ProgressLog(state)
        engine = await AsyncEngine.start(
            self._config,
            on_progress=progress,
            factory=self._factory,
            log_level=self._settings.log_level,
            on_cache_change=None if self._publisher is None else self._publisher.changed,
        )
        state.engine = engine
        if self._settings.warmup_prompts and engine.task == "generate":
            progress(wire.Progress("warming", None, f"{len(self._settings.warmup_prompts)} prompts"))
            await engine.warmup([engine.tokenizer.encode(text) for text in self._settings.warmup_prompts])
        if self._pool is not None:
            await self._pool.begin(engine)
        if self._publisher is not None:
            await announce(self._publisher, engine, state)
        state.phase, state.detail = Phase.SERVING, "ready"
        logger.info("ready after %.1f s", time.monotonic() - began)
        return engine

    async def _drain(self, state: ServerState, engine: AsyncEngine) -> int:
        state.phase, state.detail = Phase.DRAINING, DRAINING
        if self._publisher is not None:
            self._publisher.poke()
        self._stop.clear()
        again = asyncio.create_task(self._stop.wait())
        stats, patience = engine.stats(), self._settings.drain_timeout
        logger.info("draining: %d sequences, up to %.0f s", stats.running + stats.waiting, patience)
        draining = asyncio.create_task(self._drain_all(engine, patience))
        ends: set[asyncio.Future[Any]] = {draining, again, engine.dead}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        if not draining.done():
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)
            left = await self._drain_all(engine, 0.0)
            logger.warning("drain cut short, %d requests aborted", left)
            return 1 if engine.dead.done() else 0
        left = draining.result()
        log = logger.warning if left else logger.info
        log("drained, %d requests aborted", left)
        return 0

    async def _drain_all(self, engine: AsyncEngine, seconds: float) -> int:
        pools = [] if self._pool is None else [self._pool.drain(seconds)]
        return sum(await asyncio.gather(engine.drain(seconds), *pools))

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        logger.info("received %s", signal.Signals(number).name)
        self._stop.set()


class ProgressLog:
    """Write start-up progress to the log, a line every ten seconds, and to what /health and /ready answer."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._pace = LinePace()

    def __call__(self, progress: wire.Progress) -> None:
        share = "" if progress.fraction is None else f" {progress.fraction:.0%}"
        text = f"{progress.stage}{share}{': ' + progress.detail if progress.detail else ''}"
        self._state.detail = text
        self._state.started = StartProgress(
            phase=progress.stage,
            fraction=None if progress.fraction is None else round(progress.fraction, 4),
            detail=progress.detail,
        )
        if self._pace.due(progress.stage, progress.fraction):
            logger.info("%s%s", text, self._pace.times(progress.fraction))
