"""HTTP/1.1 from clients: what uvicorn runs on each connection in place of its own protocol.

uvicorn keeps the sockets, the lifespan and the shutdown; between a client's bytes and a
handler stands this class alone, because an ASGI server's messages, events and scopes cost a small request as
much as routing it does.

    bytes ─▶ RequestReader ─▶ Exchange ─▶ app.respond(exchange) as a task ─▶ the next one of the connection
                                  ▲                 │
                                  └── connection lost: its task is cancelled (P9)

Requests of one connection are answered one after the other. Of a client that pipelines one waiting request is
parsed, and a bounded rest is kept; one that does not read its answers gets no more than its socket holds.
What clients must hold to: `request_timeout` from the first byte of a request to its last (408),
`max_header_bytes` (431), `keep_alive` seconds between requests, and some bytes read every `write_timeout`
seconds while an answer waits to be sent (else the connection is broken off, which frees the pod). After an
answer that came before the request was complete the rest is read and thrown away for a moment, since closing
at once would make the client's system drop the answer.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any, Protocol

from leadline.protocol.errors import RequestError
from leadline.protocol.http.answers import InternalError, answer_to
from leadline.protocol.http.cors import answer_preflight, mark_allowed
from leadline.protocol.http.deadlines import Deadlines
from leadline.protocol.http.exchange import Exchange, SlowRequest, whole_answer
from leadline.protocol.http.request_reader import RequestReader
from leadline.protocol.http.settings import HttpSettings

__all__ = ["HttpApp", "ServerProtocol"]

_LINGER = 3.0
"""Seconds for which the rest of a request that was answered already is thrown away."""
_GRACE = 1.0
"""Seconds that a connection without a request yet gets for one when the server stops: what it sends is on its
way, and a client cannot know that it was not read."""
_FLUSH = 30.0
"""Seconds that a client gets to read the last answer of its connection."""
logger = logging.getLogger("leadline.http")


class HttpApp(Protocol):
    """An application that `ServerProtocol` can serve."""

    @property
    def settings(self) -> HttpSettings: ...

    @property
    def deadlines(self) -> Deadlines:
        """Those of clients' connections."""
        ...

    def respond(self, exchange: Exchange) -> Coroutine[Any, Any, None]:
        """Answer one request. Cancelled when the client leaves."""
        ...

    def client_stalled(self) -> None:
        """A client was cut off because it did not read its answer."""
        ...


class ServerProtocol(RequestReader):
    """Give it to `uvicorn.Config(http=…)`, with an `HttpApp` as the application."""

    __slots__ = (
        "_app",
        "_deadlines",
        "_exchange",
        "_lingering",
        "_loop",
        "_state",
        "_task",
        "_timed",
        "_unsent",
        "_waiting",
        "_write_by",
    )

    def __init__(
        self,
        config: Any,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        app: HttpApp = config.loaded_app
        super().__init__(app.settings)
        self._app = app
        self._deadlines = app.deadlines
        self._state = server_state
        self._loop = _loop or asyncio.get_running_loop()
        self._timed = False
        """The deadline of the connection is that of a request that has come in part."""
        self._exchange: Exchange | None = None
        """The request that is being answered."""
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[Exchange] = deque()
        """Requests behind it."""
        self._lingering = False
        """The last answer was given, and its request comes on."""
        self._write_by = 0.0
        """While writing is paused: when the client must have read some of what waits for it."""
        self._unsent = 0
        """Bytes that waited when it was last looked."""

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._state.connections.add(self)
        self._deadlines.set(self, time.monotonic() + self._settings.keep_alive)

    def connection_lost(self, error: Exception | None) -> None:
        self._state.connections.discard(self)
        self._deadlines.forget(self)
        self._transport = self._incoming = None
        self._deaf = True
        self._waiting.clear()
        self.resume_writing()
        exchange, task = self._exchange, self._task
        if exchange is not None and not exchange.finished:
            exchange.lost()
            if task is not None:
                task.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        transport = self._transport
        if transport is not None:
            self._unsent = transport.get_write_buffer_size()
            self._write_by = time.monotonic() + self._settings.write_timeout
            if not self._timed:
                self._deadlines.set(self, self._write_by)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._next()

    # RequestReader

    def _unfinished(self) -> None:
        """Its time runs, and its head is enough to begin with."""
        if not self._timed and not self._lingering and not (self._ending and self._incoming is None):
            self._timed = True
            self._deadlines.set(self, time.monotonic() + self._settings.request_timeout)
        if not self._waiting:
            self._next()

    def _arrived(self, exchange: Exchange | None) -> None:
        self._timed = False
        if exchange is None:
            return
        if exchange.finished:
            self._close()  # it was answered long before, and the rest was thrown away
        elif exchange is self._exchange:
            return
        elif self._exchange is None and not self._waiting and not self.write_paused:
            self._begin(exchange)
        else:
            self._waiting.append(exchange)
            self._hold()

    def _refused(self, fault: RequestError) -> None:
        self._deaf = True
        if self._incoming is not None:
            self._incoming.failed(fault)
            self._next()
        else:
            self._give_up(fault)

    # For exchanges

    def wanted(self) -> None:
        """A handler waits for the rest of a body."""
        if not self._waiting:
            self._release()

    def answered(self, exchange: Exchange) -> None:
        """The whole answer was written: on to the next request."""
        self._state.total_requests += 1
        self._exchange = self._task = None
        if not exchange.keep_alive:
            self._last = True
            if exchange.complete and not self._deaf:
                self._close()
            else:
                self._linger()
            return
        self._next()
        if self._exchange is None and not self._timed:
            self._deadlines.set(self, time.monotonic() + self._settings.keep_alive)

    # uvicorn and Deadlines

    def shutdown(self) -> None:
        """The server stops: close at once, behind the answers to what has come, or behind what must be on its
        way."""
        if self._exchange is None and not self._waiting and (self._open or not self._used) and not self._deaf:
            self._ending = True
            if self._incoming is None:
                self._deadlines.set(self, time.monotonic() + _GRACE)
                return
        if not self._close_behind():
            self._close()

    def expired(self) -> None:
        transport = self._transport
        if transport is None:
            return
        if transport.is_closing():
            transport.abort()  # it does not read what it was sent
        elif self.write_paused:
            self._stalled(transport)
        elif self._lingering:
            self._close()
        elif self._timed and (self._reading_paused or self._held is not None):
            self._deadlines.set(self, time.monotonic() + self._settings.request_timeout)  # we make it wait
        elif self._timed:
            fault = SlowRequest(
                f"the request did not arrive within {self._settings.request_timeout:g} s",
                code="request_timeout",
            )
            if self._incoming is not None:
                self._incoming.failed(fault)
            else:
                self._give_up(fault)
        elif self._exchange is None:
            self._close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _begin(self, exchange: Exchange) -> None:
        self._exchange = exchange
        origins = self._settings.cors_origins
        if origins and mark_allowed(exchange, origins) and answer_preflight(exchange):
            return
        task = self._task = self._loop.create_task(self._app.respond(exchange))
        self._state.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Answer with 500 where the handler ended without an answer."""
        self._state.tasks.discard(task)
        exchange = self._exchange
        if task is not self._task or exchange is None or exchange.finished or self._transport is None:
            return
        fault = None if task.cancelled() else task.exception()
        logger.error("%r ended without an answer", exchange.target, exc_info=fault)
        if exchange.started:
            self.drop()
        else:
            exchange.answer(*answer_to(InternalError(), exchange.path))

    def _stalled(self, transport: asyncio.Transport) -> None:
        """The client stays, and does not read: it must not keep a pod busy."""
        now, unsent = time.monotonic(), transport.get_write_buffer_size()
        if now >= self._write_by and unsent >= self._unsent:
            logger.info(
                "a client read nothing for %g s; its connection is closed", self._settings.write_timeout
            )
            self._app.client_stalled()
            transport.abort()
            return
        if now >= self._write_by:
            self._unsent = unsent
            self._write_by = now + self._settings.write_timeout
        self._deadlines.set(self, self._write_by)

    def _next(self) -> None:
        """Begin with the next request, if there is one and its answer could be written."""
        if self._exchange is not None or self.write_paused or self._transport is None:
            return
        if self._waiting:
            self._begin(self._waiting.popleft())
        elif self._incoming is not None and not self._incoming.finished:
            self._begin(self._incoming)
        if not self._waiting:
            self._release()

    def _give_up(self, fault: RequestError) -> None:
        """Answer what never became a request, and close. Answers in front of it are given first."""
        self._deaf = True
        self._timed = False
        if not self._close_behind():
            self.send(whole_answer(*answer_to(fault, self._path), close=True))
            self._linger()

    def _close_behind(self) -> bool:
        """Close behind the answer to the last request that has come; False if all were answered."""
        self._last = True
        last = self._incoming or (self._waiting[-1] if self._waiting else self._exchange)
        if last is None or last.finished:
            return False
        last.keep_alive = False
        return True

    def _linger(self) -> None:
        """Say that no answer follows, and throw away what still comes: a socket that is closed with bytes
        unread takes the answers back that its client has not read yet."""
        if self._transport is not None:
            if self._deaf and self._transport.can_write_eof():
                self._transport.write_eof()
            self._lingering = True
            self._deadlines.set(self, time.monotonic() + _LINGER)
            self._release()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._deadlines.set(self, time.monotonic() + _FLUSH)
