"""The API process's end of an engine core process: starts it, talks to it, and notices its death.

Sockets live in a fresh directory of mode 0700 with a random name, so several engines share a host without a
port or a name to agree on, nobody else can connect, and what a killed engine left behind is in nobody's way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

from leadline.engine import wire
from leadline.engine.config import EngineConfig
from leadline.engine.core.stats import SchedulerStats, Speeds
from leadline.engine.errors import EngineDead, LeadlineError

__all__ = ["CoreClient"]

logger = logging.getLogger("leadline.engine.client")

DEFAULT_FACTORY = "leadline.engine.process:build_engine_core"
_MAX_SOCKET_PATH = 90
"""sun_path holds 107 bytes on Linux; leave room for the file name."""


class CoreClient:
    """One engine core process. Create with `CoreClient.start`; all methods belong to the event loop's
    thread."""

    def __init__(self, *, on_message: Callable[[wire.FromCore], None]) -> None:
        self._on_message = on_message
        self.directory = _private_directory()
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._tx = self._context.socket(zmq.PUSH)
        self._rx = zmq.asyncio.Socket(self._context, zmq.PULL)
        for socket in (self._tx, self._rx):
            socket.set_hwm(0)
        # A PUSH socket that connects can queue before its peer is there; one that binds cannot. So the core
        # binds its inbox, and we our own.
        self._tx.setsockopt(zmq.RECONNECT_IVL, 20)
        self._tx.connect(f"ipc://{self.directory}/in")
        self._rx.bind(f"ipc://{self.directory}/out")
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_call = 0
        self._stopping = False
        self._fatal: LeadlineError | None = None
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self.ready: asyncio.Future[wire.Ready] = self._loop.create_future()
        self.resolved: asyncio.Future[wire.Resolved] = self._loop.create_future()
        self.dead: asyncio.Future[LeadlineError] = self._loop.create_future()
        """Resolves, with the reason, once the core process is gone without having been asked to go."""
        self.last_heartbeat = time.monotonic()
        self.last_stats: SchedulerStats | None = None
        self.last_speeds = Speeds(0.0, 0.0)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        on_message: Callable[[wire.FromCore], None],
        factory: str = DEFAULT_FACTORY,
        log_level: str = "warning",
        cache_events: bool = False,
    ) -> CoreClient:
        """Spawn the process and send it its config. Await `ready` (it raises the typed start-up error).

        With `cache_events`, `on_message` gets CacheChange messages too.
        """
        self = cls(on_message=on_message)
        self._spawn()
        self._reader = asyncio.create_task(self._read(), name="core-reader")
        self.send(wire.Start(config, factory, log_level, cache_events))
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def send(self, message: wire.ToCore) -> None:
        """Queue a message; never blocks. Raises EngineDead if the core is gone."""
        self.check_alive()
        self._tx.send(wire.encode(message), zmq.NOBLOCK)

    def check_alive(self) -> None:
        if self.dead.done():
            raise EngineDead(str(self.dead.result()))
        if self._stopping:
            raise EngineDead("the engine is shutting down")

    async def reset_prefix_cache(self) -> int:
        value: int = await self._call(wire.ResetPrefixCache)
        return value

    async def profile(self, steps: int | None, seconds: float | None) -> wire.Profiled:
        """Have a trace recorded; the answer comes when it is written, or says why it is not."""
        answer: wire.Profiled = await self._call(lambda call_id: wire.Profile(call_id, steps, seconds))
        return answer

    async def _call(self, message: Callable[[int], wire.ToCore]) -> Any:
        """Send what `message` makes of a new call's number; return what the core answers to it."""
        self._next_call += 1
        call_id = self._next_call
        future: asyncio.Future[Any] = self._loop.create_future()
        self._calls[call_id] = future
        try:
            self.send(message(call_id))
            return await future
        finally:
            self._calls.pop(call_id, None)

    async def stop(self, patience: float = 5.0) -> None:
        """Ask the core to leave, kill it if it has not within `patience` seconds, and remove the sockets."""
        if self._stopping:
            return
        if not self.dead.done():
            with contextlib.suppress(EngineDead, zmq.ZMQError):
                self.send(wire.Shutdown())
        self._stopping = True
        process = self._process
        if process is not None:
            try:
                await asyncio.wait_for(asyncio.shield(self._exited), patience)
            except TimeoutError:
                process.kill()
                await self._exited
            if process.stdin is not None:
                process.stdin.close()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._rx.close(linger=0)
        self._tx.close(linger=0)
        self._context.term()
        shutil.rmtree(self.directory, ignore_errors=True)
        self._fail_waiters(EngineDead("the engine is shutting down"))

    def _spawn(self) -> None:
        """A fresh interpreter. Not asyncio's subprocess: its child watchers depend on the loop and on
        SIGCHLD."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "leadline.engine.process", self.directory], stdin=subprocess.PIPE
        )
        threading.Thread(target=self._wait_for_exit, daemon=True, name="core-watch").start()

    def _wait_for_exit(self) -> None:
        assert self._process is not None
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop may have been closed under us
            self._loop.call_soon_threadsafe(self._note_exit, code)

    def _note_exit(self, code: int) -> None:
        if not self._exited.done():
            self._exited.set_result(code)
        if not self._stopping:
            # Its last words (Fatal) may still lie in the socket: give the reader a moment to take them out.
            self._loop.call_later(0.2 if self._fatal is None else 0.0, self._note_death, code)

    def _note_death(self, code: int) -> None:
        if self._stopping or self.dead.done():
            return
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        error = self._fatal or EngineDead(f"the engine core process {how}")
        self.dead.set_result(error)
        self._fail_waiters(error)

    def _fail_waiters(self, error: LeadlineError) -> None:
        waiting: list[asyncio.Future[Any]] = [self.ready, self.resolved, *self._calls.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting: no "never retrieved" warning

    async def _read(self) -> None:
        while True:
            frame: Any = await self._rx.recv()
            try:
                self._dispatch(wire.decode_from_core(frame))
            except Exception:
                logger.exception("a message of the engine core could not be handled")

    def _dispatch(self, message: wire.FromCore) -> None:
        match message:
            case wire.Heartbeat(at, stats, prefill, decode):
                self.last_heartbeat, self.last_stats = at, stats
                self.last_speeds = Speeds(prefill, decode)
            case wire.Reply(call_id, value):
                self._answer(call_id, value)
                return
            case wire.Profiled(call_id):
                self._answer(call_id, message)
                return
            case wire.Resolved():
                if not self.resolved.done():
                    self.resolved.set_result(message)
                return
            case wire.Ready(stats=stats):
                self.last_heartbeat, self.last_stats = time.monotonic(), stats
                if not self.ready.done():
                    self.ready.set_result(message)
                return
            case wire.Fatal(kind, text):
                self._fatal = wire.error_from_kind(kind, text)
                return
        self._on_message(message)

    def _answer(self, call_id: int, value: Any) -> None:
        future = self._calls.get(call_id)
        if future is not None and not future.done():
            future.set_result(value)


def _private_directory() -> str:
    """A new directory of mode 0700 whose path is short enough for a unix socket."""
    directory = tempfile.mkdtemp(prefix="leadline-")
    if len(directory.encode()) > _MAX_SOCKET_PATH:
        shutil.rmtree(directory)
        directory = tempfile.mkdtemp(prefix="leadline-", dir="/tmp")
    return directory
