"""Notes in a stream of server-sent events: comments by which an engine tells the gateway what it sent.

    event: response.output_text.delta        events that the next tokens caused
    data: {…}

    : tokens 510,2302                        all events so far stand for these output tokens
    : usage 12 2 0                           prompt, output and cached prompt tokens, before the last event
    : end                                    the answer is complete
    : lost the engine is gone                instead of an end: the engine died

An engine writes notes where a request has `return_token_ids`, on paths whose events have no field for them. A
note is an event of its own. Readers of server-sent events skip comments (WHATWG HTML, section 9.2.6), and the
gateway takes them out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["END", "Note", "lost_note", "read_note", "tokens_note", "usage_note"]

END = b": end\n\n"


class Note(msgspec.Struct, frozen=True):
    """One note. Only the fields of its kind are set."""

    tokens: tuple[int, ...] | None = None
    usage: tuple[int, int, int] | None = None
    """Prompt tokens, output tokens, cached prompt tokens."""
    lost: str | None = None
    ends: bool = False


def tokens_note(token_ids: Sequence[int]) -> bytes:
    """Say that the events so far stand for these tokens. No tokens: the events that open an answer."""
    if len(token_ids) == 1:
        return b": tokens %d\n\n" % token_ids[0]
    return b": tokens %s\n\n" % ",".join(map(str, token_ids)).encode()


def usage_note(prompt: int, output: int, cached: int) -> bytes:
    """Say how many tokens the whole request took."""
    return b": usage %d %d %d\n\n" % (prompt, output, cached)


def lost_note(message: str) -> bytes:
    """Say that the engine is gone; line breaks in `message` become blanks."""
    return b": lost %s\n\n" % " ".join(message.split()).encode("utf-8", "replace")


def read_note(event: bytes) -> Note | None:
    """The note in a whole event; None where it is none."""
    if not event.startswith(b": "):
        return None
    kind, _, rest = event[2:].strip().partition(b" ")
    try:
        if kind == b"tokens":
            return Note(tokens=tuple(map(int, rest.split(b","))) if rest else ())
        if kind == b"usage":
            prompt, output, cached = map(int, rest.split())
            return Note(usage=(prompt, output, cached))
    except ValueError:
        return None
    if kind == b"lost":
        return Note(lost=rest.decode("utf-8", "replace"))
    return Note(ends=True) if kind == b"end" and not rest else None
