"""A client's socket under ServerProtocol: reading and writing no faster than the other side can follow.

Knows bytes only; requests and answers are server_protocol.py's.
"""

import asyncio

from leadline.protocol.listening import plain_address

__all__ = ["ClientSocket"]


class ClientSocket(asyncio.Protocol):
    """The part of a connection that is the same whatever is spoken on it."""

    __slots__ = ("_drain", "_reading_paused", "_transport", "client", "write_paused")

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        """None before the connection and after it."""
        self.client: str | None = None
        """The address of the other side."""
        self._reading_paused = False
        self.write_paused = False
        """The client reads its answers slower than they come."""
        self._drain: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        peer = transport.get_extra_info("peername")
        self.client = plain_address(peer[0]) if isinstance(peer, tuple) else None

    def eof_received(self) -> bool:
        """A client that sends no more counts as one that has left."""
        return False

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        drain, self._drain = self._drain, None
        if drain is not None and not drain.done():
            drain.set_result(None)

    def send(self, data: bytes) -> None:
        """Nothing happens when the client is gone."""
        transport = self._transport
        if transport is not None:
            transport.write(data)

    async def drained(self) -> None:
        """Wait until the client has read some of what was written, or is gone."""
        while self.write_paused:
            if self._drain is None:
                self._drain = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._drain)

    def drop(self) -> None:
        """Break the connection off: what was sent cannot be made whole."""
        if self._transport is not None:
            self._transport.abort()

    def _pause_reading(self) -> None:
        if not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._reading_paused and self._transport is not None:
            self._reading_paused = False
            self._transport.resume_reading()
