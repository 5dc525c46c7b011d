"""A further API process of a server: `python -m leadline.engine.server.process.worker FD`, started by `pool`.

It joins the engine that the first process started, listens on the same port, and does all that the first one
does for a request. What concerns the whole server, starting, draining, /metrics and the core's death, it
hears through the control channel FD. When the first process dies it leaves at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys

import uvloop

from leadline.engine.client.async_engine import AsyncEngine
from leadline.engine.errors import EngineDead, LeadlineError
from leadline.engine.server.app import create_app
from leadline.engine.server.http.responses import ApiError
from leadline.engine.server.metrics.exposition import snapshot
from leadline.engine.server.process.control import (
    Begin,
    Channel,
    CoreLost,
    Counts,
    CountsWanted,
    Drain,
    Drained,
    Joined,
    Open,
    Page,
    PageWanted,
    Serving,
    Stop,
    ToWorker,
)
from leadline.engine.server.process.listening import http_server, listen, settle_garbage
from leadline.engine.server.process.logs import configure_logging
from leadline.engine.server.state import DRAINING, Phase, ServerState

__all__ = ["main"]

logger = logging.getLogger("leadline.engine.server")

_PAGE_SECONDS = 5.0


class _Worker:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._begin: asyncio.Future[Begin] = asyncio.get_running_loop().create_future()
        self._open = asyncio.Event()
        self._stop = asyncio.Event()
        self._engine: AsyncEngine | None = None
        self._state: ServerState | None = None
        self._calls = itertools.count()
        self._pages: dict[int, asyncio.Future[bytes]] = {}
        self._drains: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Until told to stop; the exit code."""
        ear = asyncio.create_task(self._hear_all(), name="control")
        try:
            begin = await self._begin
            configure_logging(begin.settings.log_level, begin.settings.log_format)
            await self._serve(begin)
        except LeadlineError as error:
            logger.error("an API process cannot serve: %s", error)
            return 1
        finally:
            ear.cancel()
        return 0

    async def _serve(self, begin: Begin) -> None:
        engine = self._engine = await AsyncEngine.join(begin.config, begin.member)
        try:
            app = create_app(engine, begin.settings)
            self._state = app.state.server
            self._state.page = self._page
            settle_garbage()
            self._channel.send(Joined())
            await self._open.wait()
            listener = listen(begin.settings.host, begin.settings.port, shared=True)
            server = http_server(app, begin.settings)
            http = asyncio.create_task(server.serve(sockets=[listener]), name="http")
            self._channel.send(Serving())
            await self._stop.wait()
            server.should_exit = True
            await http
        finally:
            await engine.stop()

    async def _hear_all(self) -> None:
        async for message in self._channel.messages():
            self._hear(message)
        os._exit(1)  # the first process is gone, and the core with it

    def _hear(self, message: ToWorker) -> None:
        match message:
            case Begin():
                self._begin.set_result(message)
            case Open():
                self._open.set()
            case CountsWanted(call):
                families = [] if self._state is None else snapshot(self._state.metrics.counted)
                self._channel.send(Counts(call, families))
            case Page(call, body):
                page = self._pages.get(call)
                if page is not None and not page.done():
                    page.set_result(body)
            case Drain(seconds):
                task = asyncio.create_task(self._drain(seconds), name="drain")
                self._drains.add(task)
                task.add_done_callback(self._drains.discard)
            case CoreLost(reason):
                if self._state is not None and self._engine is not None:
                    self._state.phase, self._state.detail = Phase.FAILED, reason
                    self._engine.note_death(EngineDead(reason))
            case Stop():
                self._open.set()
                self._stop.set()

    async def _drain(self, seconds: float) -> None:
        aborted = 0
        if self._state is not None and self._engine is not None:
            self._state.phase, self._state.detail = Phase.DRAINING, DRAINING
            aborted = await self._engine.drain(seconds)
        self._channel.send(Drained(aborted))

    async def _page(self) -> bytes:
        """The whole server's metrics, from the first process."""
        call = next(self._calls)
        page = self._pages[call] = asyncio.get_running_loop().create_future()
        self._channel.send(PageWanted(call))
        try:
            return await asyncio.wait_for(page, _PAGE_SECONDS)
        except TimeoutError:
            raise ApiError(503, "the server's first process is too busy", type="server_error") from None
        finally:
            del self._pages[call]


async def _run(end: socket.socket) -> int:
    return await _Worker(await Channel.open(end, ToWorker)).run()


def main() -> int:
    # The first process alone decides when we stop: a Ctrl-C reaches the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end = socket.socket(fileno=int(sys.argv[1]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(end))


if __name__ == "__main__":
    sys.exit(main())
