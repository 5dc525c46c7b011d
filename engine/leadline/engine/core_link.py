"""An API process's two sockets to the engine core: requests and calls out, news in.

    CoreLink        of an API process that takes part in an engine which another one started
    CoreClient      (core_client) of the one that started it: the process beside the link

All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio

from leadline.engine import wire
from leadline.engine.core.stats import SchedulerStats, Speeds
from leadline.engine.errors import EngineDead, LeadlineError
from leadline.engine.messages import CoreRequest
from leadline.engine.outbox import out_address
from leadline.engine.pulse import LOOK_SECONDS, PulseWatch

__all__ = ["CoreLink"]

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

    def add(self, requests: Sequence[CoreRequest]) -> None:
        """As `send`; news of them come here."""
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
        """Close the sockets; whoever still waits for the core gets an EngineDead. Safe to call twice."""
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
                future.exception()  # nobody may be waiting: no "never retrieved" warning

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
