"""Looks at the settings file while the gateway runs, so that a bad edit is noticed before the next start.

The settings read at the start stay in force until then, whatever happens to the file.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from leadline.gateway.config import GatewayConfig
from leadline.gateway.errors import ConfigError

__all__ = ["ConfigFile", "ConfigWatch"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Where settings come from. Can be sent to another process."""

    path: str
    read: Callable[[], GatewayConfig]
    """Reads and checks the file, with the options of the command line. Raises ConfigError."""


class ConfigWatch:
    """`watch` is a task for the event loop."""

    def __init__(self, file: ConfigFile, show: Callable[[bool], None]) -> None:
        """`show(valid)` is called when the file has changed. Raises ConfigError."""
        self._path, self._read = file.path, file.read
        self._seen = _identity(self._path)
        self._running = self._read()
        self._show = show

    def poll(self) -> None:
        """Check the file if it has changed. Never raises."""
        seen = _identity(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            new = self._read()
        except ConfigError as error:
            self._show(False)
            log.error("settings: keeping those that run, since the file is not valid: %s", error)
            return
        self._show(True)
        if new == self._running:
            log.info("settings: %s is again as it runs", self._path)
        else:
            log.warning("settings: %s has changed; restart the gateway to apply it", self._path)

    async def watch(self, every: float = 2.0) -> None:
        """Poll without end."""
        while True:
            await asyncio.sleep(every)
            self.poll()


def _identity(path: str) -> tuple[int, ...] | None:
    """Differs after each write or replacement; None: the file is missing."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
