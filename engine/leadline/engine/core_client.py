"""The end of an engine core process that started it: the link, and the process's birth and death.

Sockets live in a fresh directory of mode 0700 with a random name, so several engines share a host without a
port or a name to agree on, nobody else can connect, and what a killed engine left behind is in nobody's way.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from leadline.engine import wire
from leadline.engine.config import EngineConfig
from leadline.engine.core_link import CoreLink
from leadline.engine.errors import EngineDead, LeadlineError

__all__ = ["CoreClient"]

DEFAULT_FACTORY = "leadline.engine.process:build_engine_core"
_MAX_SOCKET_PATH = 90
"""sun_path holds 107 bytes on Linux; leave room for the file name."""


class CoreClient(CoreLink):
    """One engine core process. Create with `CoreClient.start`."""

    def __init__(self, *, on_message: Callable[[wire.FromCore], None]) -> None:
        super().__init__(_private_directory(), 0, on_message=on_message)
        self._process: subprocess.Popen[bytes] | None = None
        self._fatal: LeadlineError | None = None
        self._clients = 0
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self.ready: asyncio.Future[wire.Ready] = self._loop.create_future()
        self.resolved: asyncio.Future[wire.Resolved] = self._loop.create_future()

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
        self.listen()
        self.send(wire.Start(config, factory, log_level, cache_events))
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def attach(self) -> int:
        """Have the core talk to one more API process; returns its number, for its `CoreLink`."""
        self._clients += 1
        self.send(wire.Attach(self._clients))
        return self._clients

    def detach(self, client: int) -> None:
        """That process is gone: its requests are dropped."""
        with contextlib.suppress(EngineDead):
            self.send(wire.Detach(client))

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
        await self._close()
        shutil.rmtree(self.directory, ignore_errors=True)

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
            self._loop.call_later(0.2 if self._fatal is None else 0.0, self._note_end, code)

    def _note_end(self, code: int) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        if -code == signal.SIGKILL:
            how += " (by the kernel, because memory ran out?)"
        self.note_death(self._fatal or EngineDead(f"the engine core process {how}"))

    def _waiters(self) -> list[asyncio.Future[Any]]:
        return [self.ready, self.resolved, *super()._waiters()]

    def _dispatch(self, message: wire.FromCore) -> None:
        match message:
            case wire.Resolved():
                if not self.resolved.done():
                    self.resolved.set_result(message)
            case wire.Ready(stats=stats):
                self.last_heartbeat, self.last_stats = time.monotonic(), stats
                if not self.ready.done():
                    self.ready.set_result(message)
            case wire.Fatal(kind, text):
                self._fatal = wire.error_from_kind(kind, text)
            case _:
                super()._dispatch(message)


def _private_directory() -> str:
    """A new directory of mode 0700 whose path is short enough for a unix socket."""
    directory = tempfile.mkdtemp(prefix="leadline-")
    if len(directory.encode()) > _MAX_SOCKET_PATH:
        shutil.rmtree(directory)
        directory = tempfile.mkdtemp(prefix="leadline-", dir="/tmp")
    return directory
