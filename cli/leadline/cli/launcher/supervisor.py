"""Keeps one server running: starts it, says how far it is, starts it again when it dies.

                  ┌────────────── pause, doubling ◀──────────────┐
    start ──▶ starting ──/ready says 200──▶ ready ──it ends──────┤
                  └───────────────it ends────────────────────────┘
                       and it never was ready, twice: `failed`

A server that stayed ready for `_SETTLED` seconds has made up for its earlier deaths: the pause begins small.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence

from leadline.cli.launcher.child import ERROR_PREFIX, Child, ending

__all__ = ["Supervisor"]

_POLL = 0.1
_NOTE_EVERY = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_SETTLED = 30.0
_START_ATTEMPTS = 2


class Supervisor:
    """`start`, wait for `ready` or `failed`, `stop`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        host: str,
        port: int,
        *,
        say: Callable[[str], None],
        quiet: Callable[[str], bool] = lambda line: False,
    ) -> None:
        """`host`, `port`: where its /ready is. `say`: takes lines for the user, from any thread. `quiet`:
        lines of its output that the user need not see."""
        self.name = name
        self._command, self._environment = command, environment
        self._host, self._port = host, port
        self._say, self._quiet = say, quiet
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready_at: float | None = None
        self.ready = asyncio.Event()
        """Set while it takes requests, as far as we know."""
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why it was given up: it never became ready."""
        self._was_ready = False
        """In some life."""

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep(), name=self.name)

    async def stop(self, patience: float) -> None:
        """End it for good: SIGTERM, and SIGKILL after `patience` seconds."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._child is not None:
            await self._child.stop(patience)
        self.ready.clear()

    def kill(self) -> None:
        """End it at once; a `stop` in progress then returns."""
        if self._child is not None:
            self._child.kill()

    # -- inside ----------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        deaths = 0
        while True:
            self._ready_at = None
            what = await self._live()
            if self._ready_at is not None and time.monotonic() - self._ready_at > _SETTLED:
                deaths = 0
            deaths += 1
            if not self._was_ready and deaths >= _START_ATTEMPTS:
                self.failed.set_result(f"{self.name} {what}")
                return
            pause = min(_FIRST_PAUSE * 2 ** (deaths - 1), _LONGEST_PAUSE)
            self._say(f"{self.name} {what}; starting it again in {pause:g} s")
            await asyncio.sleep(pause)

    async def _live(self) -> str:
        """One life; how it ended."""
        try:
            child = self._child = Child(self._command, self._environment, self._heard)
        except OSError as error:  # no process or no memory for one
            return f"did not start: {error}"
        probe = asyncio.create_task(self._watch_start(child))
        try:
            code = await child.wait()
        finally:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)
            self.ready.clear()
        why = child.last_words
        return f"ended ({ending(code)})" + (f": {why}" if why else "")

    async def _watch_start(self, child: Child) -> None:
        """Until /ready says 200; what it says before is progress."""
        began, noted, last = time.monotonic(), float("-inf"), ""
        while True:
            is_ready, text = await _ask_ready(self._host, self._port)
            now = time.monotonic()
            if is_ready:
                break
            stage = text.rstrip("0123456789% ")
            if text and (stage != last or now - noted >= _NOTE_EVERY):
                self._say(f"{self.name}: {text}")
                last, noted = stage, now
            await asyncio.sleep(_POLL)
        self._ready_at, self._was_ready = now, True
        self.ready.set()
        self._say(
            f"{self.name}: ready after {now - began:.1f} s (pid {child.pid}, {self._host}:{self._port})"
        )

    def _heard(self, line: str) -> None:
        # Its error line is among its last lines, which are reported when it has ended.
        if not self._quiet(line) and not line.startswith(ERROR_PREFIX):
            self._say(f"{self.name} | {line}")


async def _ask_ready(host: str, port: int) -> tuple[bool, str]:
    """(200, what else it says). Nothing heard, within a second, is no answer."""
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    writer = None
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection(target, port)
            writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    except (OSError, TimeoutError):
        return False, ""
    finally:
        if writer is not None:
            writer.close()
    if head.split(b" ", 2)[1:2] == [b"200"]:
        return True, ""
    text = ""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(body)["error"]["message"]).removeprefix("not ready: ")
    return False, text
