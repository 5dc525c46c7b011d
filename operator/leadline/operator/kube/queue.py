"""The queue of services to reconcile.

A service that is added twice gets one pass. A service that is added during its pass gets another one
afterwards, never by two workers at a time. After failures the pauses grow.
"""

from __future__ import annotations

import asyncio

from leadline.operator.kube.store import Key

__all__ = ["WorkQueue"]

_FIRST_DELAY = 0.5
_LAST_DELAY = 60.0


class WorkQueue:
    def __init__(self) -> None:
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: set[Key] = set()
        """In `_ready`, or to be put there when their worker is done."""
        self._working: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: Key) -> None:
        if key in self._waiting:
            return
        self._waiting.add(key)
        if key not in self._working:
            self._ready.put_nowait(key)

    def add_after(self, key: Key, seconds: float) -> None:
        """Once, `seconds` from now; an earlier appointment stands."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= loop.time() + seconds:
                return
            timer.cancel()
        self._timers[key] = loop.call_later(seconds, self._due, key)

    def _due(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)

    async def take(self) -> Key:
        """The next service; the caller says `done` afterwards."""
        key = await self._ready.get()
        self._waiting.discard(key)
        self._working.add(key)
        return key

    def done(self, key: Key) -> None:
        self._working.discard(key)
        if key in self._waiting:
            self._ready.put_nowait(key)

    def failed(self, key: Key, *, slowly: bool = False) -> float:
        """Come back to it after 0.5 s, 1 s, 2 s, … up to a minute, or after a minute at once; which it is."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay = _LAST_DELAY if slowly else min(_FIRST_DELAY * 2.0 ** (failures - 1), _LAST_DELAY)
        self.add_after(key, delay)
        return delay

    def succeeded(self, key: Key) -> None:
        self._failures.pop(key, None)

    def clear(self) -> None:
        """Forget everything that is not being worked on."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._waiting.clear()
        self._failures.clear()
        while not self._ready.empty():
            self._ready.get_nowait()
