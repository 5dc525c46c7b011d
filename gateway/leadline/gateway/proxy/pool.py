"""Connections to one pod that are kept for the next request.

Room: gateway/proxy. The last one used is the first to be used again, so that those which are not needed grow
old and are dropped.
"""

import asyncio
import contextlib
import time
from collections import deque

from leadline.gateway.proxy.upstream import ConnectFailed, Connection, UpstreamTimeout
from leadline.protocol.http.deadlines import Deadlines

__all__ = ["Pool"]


class Pool:
    """Idle connections to one pod, last used first."""

    __slots__ = (
        "_closed",
        "_idle",
        "_loop",
        "_max_idle",
        "address",
        "connect_seconds",
        "deadlines",
        "idle_seconds",
        "open",
    )

    def __init__(
        self,
        address: str,
        deadlines: Deadlines,
        *,
        connect_seconds: float = 2.0,
        idle_seconds: float = 4.0,
        max_idle: int = 512,
    ) -> None:
        """`address`: host:port. `deadlines`: of all pools of the event loop. `idle_seconds` lies below the
        keep-alive timeout of common servers (5 s)."""
        self.address = address
        self.deadlines = deadlines
        self.connect_seconds = connect_seconds
        self.idle_seconds = idle_seconds
        self._max_idle = max_idle
        self._idle: deque[Connection] = deque()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self.open = 0
        """Connections that exist, idle ones included."""

    def idle(self) -> "Connection | None":
        """A connection that is there already; None: `take` makes one."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.usable and time.monotonic() - connection.idle_since < self.idle_seconds:
                return connection
            connection.abort()
        return None

    async def take(self, *, fresh: bool = False) -> Connection:
        """An idle connection, or a new one. `fresh`: a new one in any case."""
        if not fresh and (connection := self.idle()) is not None:
            return connection
        host, port = _host_and_port(self.address)
        try:
            async with asyncio.timeout(self.connect_seconds):
                _, made = await self._loop.create_connection(lambda: Connection(self, self._loop), host, port)
        except TimeoutError:
            raise UpstreamTimeout(f"{self.address} took no connection in time") from None
        except OSError as error:
            raise ConnectFailed(f"cannot connect to {self.address}: {error.strerror or error}") from None
        return made

    def put(self, connection: Connection) -> None:
        if self._closed or len(self._idle) >= self._max_idle:
            connection.abort()
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def lost(self, connection: Connection) -> None:
        self.open -= 1
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def close(self) -> None:
        """Drop what is idle now and whatever is released later."""
        self._closed = True
        while self._idle:
            self._idle.pop().abort()


def _host_and_port(address: str) -> tuple[str, int]:
    """host:port, the host of IPv6 in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
