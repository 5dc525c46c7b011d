"""One child process in a process group of its own, that cannot outlive us.

Three things end what we start: `stop` and `kill`; our own death, whatever its kind, by death_signal.py (start
children from the main thread); and when the child ends, a SIGKILL for whatever is left in its group. Its
output, both streams as one, is read line by line: handed on, and the last lines kept, because they say why it
died.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from leadline.cli.death_signal import ends_with_us

__all__ = ["ERROR_PREFIX", "Child", "ending"]

_KEPT_LINES = 40
ERROR_PREFIX = "leadline: "
"""What our own command line puts before the one line that says what went wrong."""


class Child:
    """One run of a process. Create and use it in an event loop of the main thread."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], heard: Callable[[str], None]
    ) -> None:
        """Starts it. `heard` is called with each line of its output, in a thread of its own."""
        self._heard = heard
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process = subprocess.Popen(
            ends_with_us(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,  # a Ctrl-C is for us, and we stop things in order
        )
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = loop.create_future()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, args=(loop,), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_words(self) -> str:
        """The error line it left, else the last line of its output, else nothing."""
        lines = [line for line in self._lines if line.strip()]
        errors = [line for line in lines if line.startswith(ERROR_PREFIX)]
        return errors[-1].removeprefix(ERROR_PREFIX) if errors else lines[-1] if lines else ""

    async def wait(self) -> int:
        """Its exit code, as subprocess has it, once it and its group are gone."""
        return await asyncio.shield(self._ended)

    async def stop(self, patience: float) -> None:
        """SIGTERM, and after `patience` seconds SIGKILL. Returns when it is gone."""
        if not self._ended.done():
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), patience)
                return
            self.kill()
            await self.wait()

    def kill(self) -> None:
        """End it and its group at once."""
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    # -- inside ----------------------------------------------------------------------------------------------

    def _signal(self, number: signal.Signals) -> None:
        """To the process alone: what it started is its to stop."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            self._heard(line)

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._reader.join(2.0)  # the group is gone, so the pipe ends, and with it come the last words

        def tell() -> None:
            if not self._ended.done():
                self._ended.set_result(code)

        with contextlib.suppress(RuntimeError):  # the loop has ended before us
            loop.call_soon_threadsafe(tell)


def ending(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
