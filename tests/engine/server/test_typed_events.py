"""Typed events as bytes: numbered, by template or not, with the notes that gateways read."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.engine.server.api.typed_events import EventWriter, TextTemplate
from leadline.engine.server.http.responses import ApiError
from leadline.protocol.openai.common import PromptTokensDetails, Usage
from leadline.protocol.stream_notes import Note, read_note


class Numbered(msgspec.Struct, tag_field="type", tag="a.delta", kw_only=True):
    item_id: str = 'odd "name"'
    delta: str
    index: int = 3
    sequence_number: int = 0


class Plain(msgspec.Struct, tag_field="type", tag="delta", kw_only=True):
    index: int = 3
    text: str


USAGE = Usage(
    prompt_tokens=7,
    completion_tokens=5,
    total_tokens=12,
    prompt_tokens_details=PromptTokensDetails(cached_tokens=2),
)


def written(event: msgspec.Struct, number: int = 0) -> bytes:
    writer = EventWriter(notes=False)
    writer.next_number = number
    writer.add(event)
    return writer.take()


@given(st.text(), st.integers(0, 10**6))
def test_a_template_gives_the_event_that_encoding_it_gives(text: str, number: int) -> None:
    template = TextTemplate(Numbered(delta=TextTemplate.TEXT))
    assert template.event(text, number) == written(Numbered(delta=text), number)


@given(st.text())
def test_a_template_of_events_without_numbers_does_too(text: str) -> None:
    assert TextTemplate(Plain(text=TextTemplate.TEXT)).event(text) == written(Plain(text=text))


def test_a_template_needs_its_mark() -> None:
    with pytest.raises(ValueError, match="TEXT"):
        TextTemplate(Plain(text="hello"))


def test_events_are_numbered_in_the_order_in_which_they_are_added() -> None:
    writer, template = EventWriter(notes=False), TextTemplate(Numbered(delta=TextTemplate.TEXT))
    writer.add(Numbered(delta="a"))
    writer.add_text(template, "b")
    with writer.muted():
        writer.add(Numbered(delta="not written"))
    writer.add(Plain(text="has no number"))
    writer.add(Numbered(delta="c"))
    data = [part.split(b"data: ")[1] for part in writer.take().split(b"\n\n")[:-1]]
    assert [msgspec.json.decode(one).get("sequence_number") for one in data] == [0, 1, None, 3]
    assert writer.take() == b""


def test_notes_are_written_where_they_were_asked_for() -> None:
    def stream(notes: bool) -> list[bytes]:
        writer = EventWriter(notes=notes)
        writer.tokens([])
        writer.add(Numbered(delta="a"))
        writer.tokens([4, 5])
        return [part + b"\n\n" for part in writer.close(Numbered(delta="z"), USAGE).split(b"\n\n")[:-1]]

    assert [read_note(event) for event in stream(True)] == [
        Note(tokens=()),
        None,
        Note(tokens=(4, 5)),
        Note(usage=(7, 5, 2)),
        None,
        Note(ends=True),
    ]
    assert [read_note(event) for event in stream(False)] == [None, None]


def test_a_dead_engine_is_a_note_to_gateways_and_an_event_to_clients() -> None:
    dead = ApiError(503, "the core is gone", type="server_error", code="engine_dead")
    late = ApiError(504, "too late", type="server_error", code="deadline_exceeded")

    def ending(error: ApiError, notes: bool) -> list[Note | None]:
        writer = EventWriter(notes=notes)
        writer.add(Numbered(delta="half written"))
        data = writer.fail(error, Plain(text=error.message))
        assert b"half" not in data
        return [read_note(part + b"\n\n") for part in data.split(b"\n\n")[:-1]]

    assert ending(dead, True) == [Note(lost="the core is gone")]
    assert ending(late, True) == [None, Note(ends=True)]
    assert ending(dead, False) == ending(late, False) == [None]
