"""The connection of an API process to the engine core: messages both ways, calls, and the core's end.

`CoreLink` attaches to a core that runs; `CoreClient` starts the core's process as well and stops it. Sockets
lie in a fresh directory of mode 0700 with a random name. So several engines share a host without a port or a
name to agree on, no other user can connect, and what a killed engine left behind disturbs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio

from leadline.engine import wire
from leadline.engine.config import EngineConfig
from leadline.engine.core.stats import SchedulerStats, Speeds
from leadline.engine.core_process.output_sender import out_address
from leadline.engine.errors import EngineDead, LeadlineError
from leadline.engine.messages import CoreRequest, PoolingRequest
from leadline.engine.system.pulse import LOOK_SECONDS, PulseWatch

__all__ = ["CoreClient", "CoreLink"]


logger = logging.getLogger("leadline.engine.client")


class CoreLink:
    """Attributes: dead (resolves, with the reason, once the core is gone without having been asked to go),
    last_heartbeat (time.monotonic seconds), last_stats, last_speeds, frozen (why the core's process counts as
    frozen; None while it does not)."""

    def __init__(self, directory: str, client: int, *, on_message: Callable[[wire.FromCore], None]) -> None:
        """`client`: the number under which the core knows this process."""
        self.directory = directory
        self.client = client
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._tx = self._context.socket(zmq.PUSH)
        self._rx = zmq.asyncio.Socket(self._context, zmq.PULL)
        for socket in (self._tx, self._rx):
            socket.set_hwm(0)
        # A PUSH socket that connects can queue before its peer is there; one that binds cannot. So the core
        # binds its inbox, and we our own.
        self._tx.setsockopt(zmq.RECONNECT_IVL, 20)
        self._tx.connect(f"ipc://{directory}/in")
        self._rx.bind(out_address(directory, client))
        self._reader: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_call = 0
        self._stopping = False
        self._heard = asyncio.Event()
        self.dead: asyncio.Future[LeadlineError] = self._loop.create_future()
        self.last_heartbeat = time.monotonic()
        self.frozen: str | None = None
        self.last_stats: SchedulerStats | None = None
        self.last_speeds = Speeds(0.0, 0.0)

    def listen(self) -> None:
        """Begin to read."""
        self._reader = asyncio.create_task(self._read(), name="core-reader")

    def watch(self) -> None:
        """Begin to look for the core's sign of life. Not before it is ready: while it loads, a slow disk may
        hold it up in the middle of an import."""
        self._watcher = asyncio.create_task(self._watch(PulseWatch(self.directory)), name="core-pulse")

    async def heartbeat(self) -> None:
        """Wait for the first one: then the core knows this process."""
        await self._heard.wait()

    def send(self, message: wire.ToCore) -> None:
        """Queue a message; never blocks. Raises EngineDead if the core is gone."""
        self.check_alive()
        self._tx.send(wire.encode(message), zmq.NOBLOCK)

    def add(self, requests: Sequence[CoreRequest | PoolingRequest]) -> None:
        """Send requests whose outputs come to this process."""
        self.send(wire.Add(list(requests), self.client))

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
        """Send what `message` makes of a new call's id; return what the core answers to it."""
        self._next_call += 1
        call_id = wire.new_call_id(self.client, self._next_call)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._calls[call_id] = future
        try:
            self.send(message(call_id))
            return await future
        finally:
            self._calls.pop(call_id, None)

    async def stop(self) -> None:
        """Close the sockets. Calls that still wait for the core raise EngineDead. Safe to call twice."""
        if not self._stopping:
            self._stopping = True
            await self._close()

    async def _close(self) -> None:
        tasks = [task for task in (self._reader, self._watcher) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._rx.close(linger=0)
        self._tx.close(linger=0)
        self._context.term()
        self._fail_waiters(EngineDead("the engine is shutting down"))

    def note_death(self, error: LeadlineError) -> None:
        """The core is gone, unasked."""
        if not self._stopping and not self.dead.done():
            self.dead.set_result(error)
            self._fail_waiters(error)

    def _waiters(self) -> list[asyncio.Future[Any]]:
        return list(self._calls.values())

    def _fail_waiters(self, error: LeadlineError) -> None:
        for future in self._waiters():
            if not future.done():
                future.set_exception(error)
                future.exception()  # no task may be waiting: avoid the warning "never retrieved"

    async def _watch(self, pulse: PulseWatch) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            frozen = pulse.look()
            if frozen == self.frozen:
                continue
            if self.client == 0:
                if frozen is not None:
                    logger.error("%s; the server is not ready until it goes on", frozen)
                else:
                    logger.warning("the engine core goes on")
            self.frozen = frozen

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
                self._heard.set()
            case wire.Reply(call_id, value):
                self._answer(call_id, value)
            case wire.Profiled(call_id):
                self._answer(call_id, message)
            case _:
                self._on_message(message)

    def _answer(self, call_id: int, value: Any) -> None:
        future = self._calls.get(call_id)
        if future is not None and not future.done():
            future.set_result(value)


DEFAULT_FACTORY = "leadline.engine.core_process.main:build_engine_core"
_MAX_SOCKET_PATH = 90
"""sun_path holds 107 bytes on Linux; leave space for the file name."""


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
            [sys.executable, "-m", "leadline.engine.core_process.main", self.directory],
            stdin=subprocess.PIPE,
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
