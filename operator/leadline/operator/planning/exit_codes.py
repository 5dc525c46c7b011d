"""How a container ended, in words, from its exit code.

Pure. Above 128 it is 128 plus the signal that ended the process (POSIX shells, and container
runtimes after them); 126 and 127 are the runtime's own.
"""

from __future__ import annotations

import signal

__all__ = ["how_it_ended"]

_CODES = {126: "its command cannot be run", 127: "its command is not in the image"}
_SIGNALS = {
    signal.SIGKILL: "killed from outside: the node ran out of memory, or the container did not stop in time, "
    "after its liveness probe had failed for one. `kubectl describe pod` has the Events",
    signal.SIGTERM: "told to stop",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up, as for a failed check or want of memory",
    signal.SIGBUS: "as where a volume or /dev/shm is full",
    signal.SIGILL: "its CPU lacks an instruction that the image uses",
}


def how_it_ended(code: int) -> str:
    """As in "ended with exit code 137 (SIGKILL: killed from outside: …)"."""
    text = f"ended with exit code {code}"
    if code in _CODES:
        return f"{text} ({_CODES[code]})"
    if not 128 < code < 128 + signal.NSIG:
        return text
    try:
        number = signal.Signals(code - 128)
    except ValueError:
        return f"{text} (signal {code - 128})"
    why = _SIGNALS.get(number)
    return f"{text} ({number.name}: {why})" if why else f"{text} ({number.name})"
