"""Pooling requests in flight in one API process: each ends with one output of the core, or with an error.

It has the interface of `streams.Streams` towards the engine. Belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from leadline.engine import wire
from leadline.engine.errors import LeadlineError, RequestError
from leadline.engine.messages import CoreOutput, PoolingRequest

__all__ = ["PoolingCalls"]


class PoolingCalls:
    """`send_abort` tells the core to drop requests and must not raise."""

    def __init__(self, send_abort: Callable[[list[str]], None]) -> None:
        self._send_abort = send_abort
        self._calls: dict[str, asyncio.Future[CoreOutput]] = {}
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()

    def __len__(self) -> int:
        return len(self._calls)

    async def call(self, request: PoolingRequest, send: Callable[[], None]) -> CoreOutput:
        """`send` the request to the core and wait for its output. Raises what ended it otherwise; a task that
        is cancelled here aborts the request in the core."""
        name = request.request_id
        if name in self._calls:
            raise RequestError(f"a request with the id {name!r} is in flight")
        future: asyncio.Future[CoreOutput] = asyncio.get_running_loop().create_future()
        self._calls[name] = future
        self.idle.clear()
        try:
            send()
            output = await future
        finally:
            del self._calls[name]
            if not future.done() or future.cancelled():
                self._send_abort([name])
            if not self._calls:
                self.idle.set()
        if (error := wire.failure_of(output)) is not None:
            raise error
        return output

    def deliver(self, outputs: list[CoreOutput]) -> None:
        for output in outputs:
            future = self._calls.get(output.request_id)
            if future is not None and not future.done():
                future.set_result(output)

    def reject(self, refusal: wire.Rejected) -> None:
        self._fail(refusal.request_id, wire.error_of(refusal))

    def fail_all(self, error: LeadlineError) -> int:
        """End every request with `error` and drop it in the core; returns how many there were."""
        names = list(self._calls)
        for name in names:
            self._fail(name, error)
        if names:
            self._send_abort(names)
        return len(names)

    def _fail(self, name: str, error: LeadlineError) -> None:
        future = self._calls.get(name)
        if future is not None and not future.done():
            future.set_exception(error)
