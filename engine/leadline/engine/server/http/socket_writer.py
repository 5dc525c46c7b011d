"""Writes events straight to a client's socket, for the tokens in the middle of a stream.

An ASGI `send` per token means a task switch per token, and most tokens need only one write. `EventStream`
connects an SocketWriter once the headers are out; code that then has an event while the stream's task waits
may `write` it. Where that is not possible (another server than our `ServerProtocol`, a client that does not
read, one that has left) `ready` is False, and the event goes through ASGI, which waits for the client.

`EventTemplate` formats them: the chunks in the middle of a stream differ only in their text, and in the token
ids for readers that want them (gateways do).
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from leadline.protocol.http.asgi import EXCHANGE, Scope
from leadline.protocol.http.exchange import Exchange

__all__ = ["EventTemplate", "SocketWriter"]

_encode = msgspec.json.Encoder().encode


class EventTemplate:
    """Server-sent events that differ in one string, and in a list of token ids if there is one.

    before TEXT between IDS after        without ids: before TEXT between
    """

    __slots__ = ("_after", "_parts", "_with_ids")

    TEXT = "\x00text\x00"
    """What stands for the string in the example."""
    IDS: ClassVar[list[int]] = [-(2**53)]
    """What stands for the list; no token has this id."""

    def __init__(self, example: Any, places: int = 1) -> None:
        """`example`: what `msgspec` encodes, with TEXT where the string goes, in as many `places` (any other
        text that a caller can choose stands before them), and behind it IDS where the list goes."""
        parts = (b"data: " + _encode(example) + b"\n\n").rsplit(_encode(self.TEXT), places)
        if len(parts) <= places:
            raise ValueError("the example does not hold EventTemplate.TEXT")
        parts[-1], ids, self._after = parts[-1].partition(_encode(self.IDS))
        self._parts = parts
        self._with_ids = bool(ids)

    def event(self, text: str, token_ids: list[int]) -> bytes:
        event = _encode(text).join(self._parts)
        return event + _encode(token_ids) + self._after if self._with_ids else event


class SocketWriter:
    """Writes to the socket of one answer. Belongs to the event loop's thread."""

    __slots__ = ("_exchange",)

    def __init__(self) -> None:
        self._exchange: Exchange | None = None

    def connect(self, scope: Scope) -> None:
        """Become ready, if the server is ours. Call when the first event has been sent."""
        self._exchange = scope.get(EXCHANGE)

    def close(self) -> None:
        """Nothing more is written: the answer's last piece is about to go out, or its client has left."""
        self._exchange = None

    @property
    def ready(self) -> bool:
        exchange = self._exchange
        return not (exchange is None or exchange.gone or exchange.connection.write_paused)

    def write(self, event: bytes) -> None:
        """Send one event at once. Only while `ready`."""
        assert self._exchange is not None
        self._exchange.push(event)
