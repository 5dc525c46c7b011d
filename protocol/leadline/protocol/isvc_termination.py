"""What a container of a pod says last: `{"reason": …, "message": …}`, one JSON object as termination message.

The engine's process writes it, the operator reads it: the reason is the name of a typed error (or of whatever
exception ended the process), so that the wording does not matter. Kubernetes keeps 4096 bytes of the file
at `terminationMessagePath`; where a process could not write it (killed, out of memory), the end of its log
stands there instead (`terminationMessagePolicy: FallbackToLogsOnError`).
"""

from __future__ import annotations

import msgspec

__all__ = ["TERMINATION_VARIABLE", "TerminationMessage", "read_termination", "write_termination"]

TERMINATION_VARIABLE = "LEADLINE_TERMINATION_LOG"
"""Environment variable that names the file; unset: nothing is written."""
_MAX_BYTES = 4096


class TerminationMessage(msgspec.Struct, frozen=True):
    reason: str
    """Name of an exception's class: ModelNotFound, ModelUnreachable, Unauthorized, ConfigError, …"""
    message: str
    """One line for a person."""


_decoder = msgspec.json.Decoder(TerminationMessage)


def read_termination(text: str) -> TerminationMessage | None:
    """None for anything else than such an object, such as the end of a log."""
    try:
        return _decoder.decode(text)
    except msgspec.DecodeError:
        return None


def write_termination(path: str, reason: str, message: str) -> None:
    """Write it, the message cut to what Kubernetes keeps. Raises OSError."""
    while len(data := msgspec.json.encode(TerminationMessage(reason, message))) > _MAX_BYTES:
        message = message[: len(message) - max(1, (len(data) - _MAX_BYTES) // 4)]
    with open(path, "wb") as file:
        file.write(data)
