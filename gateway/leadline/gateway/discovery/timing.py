"""How often discovery lists and watches, and how long it waits."""

import msgspec

__all__ = ["Timing"]


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds."""

    resync: float = 300.0
    """Between complete lists."""
    watch: float = 60.0
    """The server is asked to end a watch after so long."""
    slack: float = 15.0
    """A watch that is silent for `watch` and this long is dead."""
    request: float = 20.0
    """A list may take so long between two bytes."""
    first_pause: float = 0.2
    longest_pause: float = 30.0
