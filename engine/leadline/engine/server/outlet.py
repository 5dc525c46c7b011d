"""Events straight to a client's socket, for the tokens in the middle of a stream.

Owns the way around ASGI: an ASGI `send` per token means a task switch per token, and all that most tokens
need is one write. `EventStream` connects an outlet once the headers are out; whoever then has an event while
the stream's task waits may `write` it. Where the way is not open (another server than uvicorn's httptools
protocol, a client that does not read, one that has left) `ready` is False, and the event goes the usual way,
which waits for the client and notices that it is gone.

`EventTemplate` is the other half: of the chunks in the middle of a stream only the text differs, and the
token ids for a reader that wants them (gateways do).
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import msgspec
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

__all__ = ["EventTemplate", "Outlet", "send_for"]

_encode = msgspec.json.Encoder().encode


class EventTemplate:
    """Server-sent events that differ in one string, and in a list of token ids if there is one.

    before TEXT between IDS after        without ids: before TEXT between
    """

    __slots__ = ("_after", "_before", "_between", "_with_ids")

    TEXT = "\x00text\x00"
    """What stands for the string in the example."""
    IDS: ClassVar[list[int]] = [-(2**53)]
    """What stands for the list; no token has this id."""

    def __init__(self, example: Any) -> None:
        """`example`: what `msgspec` encodes, with TEXT where the string goes (any other text that a caller
        can choose stands before it), and behind it IDS where the list goes."""
        before, text, rest = _encode(example).rpartition(_encode(self.TEXT))
        if not text:
            raise ValueError("the example does not hold EventTemplate.TEXT")
        between, ids, after = (rest + b"\n\n").partition(_encode(self.IDS))
        self._before, self._between, self._after = b"data: " + before, between, after
        self._with_ids = bool(ids)

    def event(self, text: str, token_ids: list[int]) -> bytes:
        if self._with_ids:
            return self._before + _encode(text) + self._between + _encode(token_ids) + self._after
        return self._before + _encode(text) + self._between


class Outlet:
    """One answer's way to its socket. Belongs to the event loop's thread."""

    __slots__ = ("_cycle", "_transport")

    def __init__(self) -> None:
        self._cycle: RequestResponseCycle | None = None
        self._transport: asyncio.Transport | None = None

    def connect(self, receive: Receive) -> None:
        """Open it, if the server is one whose sockets we know. Call when the headers have been sent."""
        cycle = _cycle_of(receive)
        if cycle is not None and cycle.chunked_encoding and cycle.response_started:
            self._cycle, self._transport = cycle, cycle.transport

    def close(self) -> None:
        """Nothing more is written: the answer's last piece is about to go out, or its client has left."""
        self._cycle = self._transport = None

    @property
    def ready(self) -> bool:
        cycle = self._cycle
        return not (cycle is None or cycle.disconnected or cycle.flow.write_paused)

    def write(self, event: bytes) -> None:
        """As one chunk of the answer's chunked encoding (RFC 9112 section 7.1). Only while `ready`."""
        assert self._transport is not None
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))


def send_for(scope: Scope, receive: Receive, send: Send) -> Send:
    """What an answer of unknown length is sent by: to HTTP/1.0, which knows no chunks (RFC 9112 section 6.1),
    uvicorn would send them too. There the answer ends with its connection."""
    cycle = _cycle_of(receive)
    if cycle is None or scope["http_version"] != "1.0":
        return send
    cycle.chunked_encoding = False

    async def send_bare(message: Message) -> None:
        cycle.expected_content_length += len(message.get("body", b""))
        await send(message)

    return send_bare


def _cycle_of(receive: Receive) -> RequestResponseCycle | None:
    cycle = getattr(receive, "__self__", None)
    return cycle if isinstance(cycle, RequestResponseCycle) else None
