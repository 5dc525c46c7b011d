"""Work that is repeated without end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

__all__ = ["repeat"]

log = logging.getLogger(__name__)


_FAULT_SECONDS = 2.0
"""The least pause after a fault."""


async def repeat(what: str, act: Callable[[], Awaitable[object]], seconds: float = 0.0) -> None:
    """Await `act` again and again, with a pause of `seconds` after each call. An exception of it is logged
    and does not end the other work of the operator."""
    while True:
        pause = seconds
        try:
            await act()
        except Exception:
            pause = max(seconds, _FAULT_SECONDS)
            log.exception("%s: a fault of the operator; again in %g s", what, pause)
        await asyncio.sleep(pause)
