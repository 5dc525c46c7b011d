"""Events straight to a client's socket, for the tokens in the middle of a stream.

Owns the way around ASGI: an ASGI `send` per token means a task switch per token, and all that most tokens
need is one write. `EventStream` connects an outlet once the headers are out; whoever then has an event while
the stream's task waits may `write` it. Where the way is not open (another server than our `ServerProtocol`, a
client that does not read, one that has left) `ready` is False, and the event goes the usual way, which waits
for the client.

`EventTemplate` is the other half: of the chunks in the middle of a stream only the text differs, and the
token ids for a reader that wants them (gateways do).
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from leadline.protocol.http.asgi import EXCHANGE, Scope
from leadline.protocol.http.exchange import Exchange

__all__ = ["EventTemplate", "Outlet"]

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


class Outlet:
    """One answer's way to its socket. Belongs to the event loop's thread."""

    __slots__ = ("_exchange",)

    def __init__(self) -> None:
        self._exchange: Exchange | None = None

    def connect(self, scope: Scope) -> None:
        """Open it, if the server is ours. Call when the first event has been sent."""
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
