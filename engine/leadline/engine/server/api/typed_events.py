"""Streams of typed events, as Responses and Messages have them: an event has a name, which its data repeats.

    event: response.output_text.delta
    data: {"type":"response.output_text.delta", …, "sequence_number":7}

`EventWriter` turns events into bytes, numbers them where they have numbers, and writes the notes that let a
gateway move the stream (`leadline.protocol.stream_notes`) where the request asked for them. `TextTemplate`
writes the events in the middle of a stream, of which only text and number differ, without building them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from leadline.engine.server.http.responses import ApiError
from leadline.protocol.openai.common import Usage
from leadline.protocol.stream_notes import END, lost_note, tokens_note, usage_note

__all__ = ["EventWriter", "TextTemplate"]

_encode = msgspec.json.Encoder().encode
_NUMBER = "sequence_number"


class TextTemplate:
    """Events of one type that differ in one string, and in their number if they have one."""

    __slots__ = ("_before", "_between", "is_numbered")

    TEXT = "\x00text\x00"
    """What stands for the string in the example."""

    def __init__(self, example: msgspec.Struct) -> None:
        """`example`: an event with TEXT where the string goes (any other text that a caller can choose stands
        before it). `sequence_number`, if there is one, is its last field."""
        before, text, rest = _encode(example).rpartition(_encode(self.TEXT))
        if not text:
            raise ValueError("the example does not hold TextTemplate.TEXT")
        self._before = _head(example) + before
        between, number, _ = rest.rpartition(b'"%s":' % _NUMBER.encode())
        self._between = between + number if number else rest + b"\n\n"
        self.is_numbered = bool(number)

    def event(self, text: str, number: int = 0) -> bytes:
        """Return the event with this text and number."""
        if self.is_numbered:
            return self._before + _encode(text) + self._between + b"%d}\n\n" % number
        return self._before + _encode(text) + self._between


class EventWriter:
    """Collects the events of one answer as bytes.

        writer.add(event) ─▶ writer.tokens(ids) ─▶ writer.take() ─▶ … ─▶ writer.close(last, usage)

    An event is a Struct tagged with its name in the field `type`. One that has a `sequence_number` is given
    the next number.
    """

    def __init__(self, *, notes: bool) -> None:
        """`notes`: write notes for the gateway."""
        self.next_number = 0
        """Of the next event. Set it where an answer goes on that another pod began."""
        self._notes = notes
        self._muted = False
        self._out: list[bytes] = []

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Write nothing: what is added here has been written by another pod."""
        before, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = before

    def add(self, event: msgspec.Struct) -> None:
        """Add an event."""
        if hasattr(event, _NUMBER):
            event.sequence_number = self.next_number  # type: ignore[attr-defined]
            self.next_number += 1
        if not self._muted:
            self._out.append(b"%b%b\n\n" % (_head(event), _encode(event)))

    def add_text(self, template: TextTemplate, text: str) -> None:
        """Add an event of a template."""
        if not self._muted:
            self._out.append(template.event(text, self.next_number))
        if template.is_numbered:
            self.next_number += 1

    def text_event(self, template: TextTemplate, text: str, token_ids: Sequence[int]) -> bytes:
        """Return an event of a template and the note behind it at once, in place of adding them. Without
        text and notes it is empty."""
        event = b""
        if text:
            number = self.next_number
            event = template.event(text, number)
            if template.is_numbered:
                self.next_number = number + 1
        return event + tokens_note(token_ids) if self._notes else event

    def tokens(self, token_ids: Sequence[int]) -> None:
        """Note that the events so far stand for these tokens (none: they open the answer)."""
        if self._notes:
            self._out.append(tokens_note(token_ids))

    def take(self) -> bytes:
        """Return what was added since it was taken last."""
        out = self._out
        if len(out) == 1:
            return out.pop()
        data = b"".join(out)
        out.clear()
        return data

    def close(self, last: msgspec.Struct, usage: Usage) -> bytes:
        """Add the last event and return all that was not taken yet."""
        if self._notes:
            details = usage.prompt_tokens_details
            cached = 0 if details is None else details.cached_tokens
            self._out.append(usage_note(usage.prompt_tokens, usage.completion_tokens, cached))
        self.add(last)
        if self._notes:
            self._out.append(END)
        return self.take()

    def fail(self, error: ApiError, last: msgspec.Struct) -> bytes:
        """Return what ends a stream that cannot go on: `last`, the event that says so, or the note that asks
        the gateway for another pod. Events that were not taken are dropped."""
        self._out.clear()
        if self._notes and error.code == "engine_dead":
            return lost_note(error.message)
        self.add(last)
        if self._notes:
            self._out.append(END)
        return self.take()


def _head(event: msgspec.Struct) -> bytes:
    """What stands before the data of an event."""
    return b"event: %b\ndata: " % str(event.__struct_config__.tag).encode()
