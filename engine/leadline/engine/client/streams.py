"""The requests in flight between the core and their readers, and what happens when either side ends.

A request's deltas wait in a deque of its own until its reader takes them. A reader may also pass `on_delta`,
a function for the deltas that come while it waits: most of them, and each then costs a call instead of a task
switch and a resumption of every generator between the reader and its stream.

    put ──▶ reader waits, nothing queued, the choice goes on ──▶ on_delta(delta) ── True: done
              └─ otherwise, or `on_delta` declines ───▶ deque ──▶ deltas()

So `on_delta` never overtakes the deque, and the last delta of a choice always comes by `deltas`. Belongs to
the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from leadline.engine import wire
from leadline.engine.errors import LeadlineError
from leadline.engine.frontend.output_processor import OutputProcessor
from leadline.engine.messages import CoreOutput, CoreRequest
from leadline.engine.outputs import OutputDelta

__all__ = ["DeltaCallback", "Stream", "Streams"]

DeltaCallback = Callable[[OutputDelta], bool]
"""Handles a delta at once, or returns False to have it queued. Must not wait."""


@dataclass(slots=True)
class Stream:
    """One request in flight. `children` are the sequences to send to the core, one per choice at most."""

    request_id: str
    children: list[CoreRequest]
    choices: int
    """Choices that have not ended. A resumed request may be over without a child."""
    items: deque[OutputDelta] = field(default_factory=deque)
    error: Exception | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    on_delta: DeltaCallback | None = None
    waiting: bool = False
    """The reader has dealt with everything so far and waits for more."""

    def put(self, delta: OutputDelta) -> None:
        if self.waiting and self.on_delta is not None and delta.finish_reason is None:
            try:
                if self.on_delta(delta):
                    return
            except Exception as error:  # the reader's own, and this loop serves others too
                self.fail(error)
                return
        self.items.append(delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End it with `error`, after what has already come. The first error counts."""
        self.error = self.error or error
        self._wake()

    def _wake(self) -> None:
        self.waiting = False
        self.news.set()

    async def deltas(self) -> AsyncGenerator[OutputDelta, None]:
        """Until every choice has a finish_reason. Raises what ended it otherwise."""
        while self.choices:
            while self.items:
                delta = self.items.popleft()
                if delta.finish_reason is not None:
                    self.choices -= 1
                    if (error := wire.failure_of(delta)) is not None:
                        raise error
                yield delta
            if not self.choices:
                return
            if self.error is not None:
                raise self.error
            self.news.clear()
            self.waiting = True
            await self.news.wait()


class Streams:
    """All of them. `send_abort` tells the core to drop sequences and must not raise."""

    def __init__(self, processor: OutputProcessor, send_abort: Callable[[list[str]], None]) -> None:
        self._processor = processor
        self._send_abort = send_abort
        self._streams: dict[str, Stream] = {}
        self._owner: dict[str, Stream] = {}
        """Core request id → its stream."""
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request: CoreRequest, on_delta: DeltaCallback | None = None) -> Stream:
        """Raises RequestError when a request of that id is in flight."""
        children = self._processor.add(request)
        stream = Stream(request.request_id, children, request.sampling.n, on_delta=on_delta)
        if (earlier := self._processor.take_resumed(request)) is not None:
            stream.items.append(earlier)
        self._streams[request.request_id] = stream
        self._owner.update((child.request_id, stream) for child in stream.children)
        self.idle.clear()
        return stream

    def close(self, stream: Stream) -> None:
        """Drop the rest of a stream whose reader has gone."""
        self._abort(stream)
        stream.waiting = False
        self._streams.pop(stream.request_id, None)
        for child in stream.children:
            self._owner.pop(child.request_id, None)
        if not self._streams:
            self.idle.set()

    def deliver(self, outputs: list[CoreOutput]) -> None:
        aborts: list[str] = []
        for output in outputs:
            deltas, to_abort = self._processor.process(output)
            aborts += to_abort
            for delta in deltas:
                stream = self._streams.get(delta.request_id)
                if stream is not None:
                    stream.put(delta)
        if aborts:
            self._send_abort(aborts)

    def reject(self, refusal: wire.Rejected) -> None:
        stream = self._owner.get(refusal.request_id)
        if stream is not None:
            stream.fail(wire.error_of(refusal))

    def fail_all(self, error: LeadlineError) -> int:
        """End every request with `error` and drop it in the core; returns how many there were."""
        streams = list(self._streams.values())
        for stream in streams:
            self._abort(stream)
            stream.fail(error)
        return len(streams)

    def _abort(self, stream: Stream) -> None:
        children = self._processor.abort(stream.request_id)
        if children:
            self._send_abort(children)
