"""The garbage collector while an engine runs inside another program's process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["calm_garbage_collector"]


@contextmanager
def calm_garbage_collector() -> Iterator[None]:
    """Keep full collections out of a busy loop in a process that is not ours alone (E26).

    With thousands of live requests one costs 100 ms and more. Young objects are still collected; afterwards
    the collector works as before.
    """
    before = gc.get_threshold()
    gc.set_threshold(50_000, 50, 1_000_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
