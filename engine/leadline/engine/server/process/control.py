"""What the process that the user started and its further API processes say to each other.

    first process ── Begin, Open, CountsWanted, Page, Drain, CoreLost, Stop ──▶ worker
                  ◀── Joined, Serving, Counts, PageWanted, Drained ──

Over a socket pair that the worker inherits. Its end is the end of the other side, however that died. Tokens
never pass here: a worker talks to the core by itself.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from leadline.engine.client.async_engine import Membership
from leadline.engine.config import EngineConfig
from leadline.engine.server.metrics.exposition import Family
from leadline.engine.server.settings import ServerSettings

__all__ = [
    "Begin",
    "Channel",
    "CoreLost",
    "Counts",
    "CountsWanted",
    "Drain",
    "Drained",
    "FromWorker",
    "Joined",
    "Open",
    "Page",
    "PageWanted",
    "Serving",
    "Stop",
    "ToWorker",
]


class Begin(msgspec.Struct, tag=True, frozen=True):
    """Join the engine; the port to listen on later is that of `settings`."""

    config: EngineConfig
    settings: ServerSettings
    member: Membership


class Open(msgspec.Struct, tag=True, frozen=True):
    """Listen. Not before the first process serves: a client that finds one of them ready may rely on all."""


class CountsWanted(msgspec.Struct, tag=True, frozen=True):
    call: int


class Page(msgspec.Struct, tag=True, frozen=True):
    """The answer to PageWanted."""

    call: int
    body: bytes


class Drain(msgspec.Struct, tag=True, frozen=True):
    """Admit nothing more and finish what runs; what is left after so many seconds is aborted."""

    seconds: float


class CoreLost(msgspec.Struct, tag=True, frozen=True):
    """The engine core is gone."""

    reason: str


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Let decided answers leave, then go."""


class Joined(msgspec.Struct, tag=True, frozen=True):
    """The worker could serve."""


class Serving(msgspec.Struct, tag=True, frozen=True):
    """The worker listens."""


class Counts(msgspec.Struct, tag=True, frozen=True):
    """The answer to CountsWanted: what this worker counted so far."""

    call: int
    families: list[Family]


class PageWanted(msgspec.Struct, tag=True, frozen=True):
    """The worker was asked for /metrics, which are those of the whole server."""

    call: int


class Drained(msgspec.Struct, tag=True, frozen=True):
    aborted: int


ToWorker = Begin | Open | CountsWanted | Page | Drain | CoreLost | Stop
FromWorker = Joined | Serving | Counts | PageWanted | Drained

_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode


class Channel:
    """One end. Messages are msgpack, each after its length. Belongs to the event loop's thread."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any) -> None:
        """Use `Channel.open`."""
        self._reader, self._writer = reader, writer
        self._decode = msgspec.msgpack.Decoder(kind).decode

    @classmethod
    async def open(cls, end: socket.socket, kind: Any) -> Channel:
        """`kind`: the union of what comes in here."""
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer, kind)

    def send(self, message: ToWorker | FromWorker) -> None:
        """Queue it; lost if the other side is gone, which `messages` tells."""
        if not self._writer.is_closing():
            frame = _encode(message)
            self._writer.write(_LENGTH.pack(len(frame)) + frame)

    async def messages(self) -> AsyncIterator[Any]:
        """Until the other side has gone."""
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                yield self._decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def close(self) -> None:
        self._writer.close()
