"""Items and events of a response, for any pieces of output, without a server."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.engine.frontend.tool_formats import CallDelta, ParsedText
from leadline.engine.server.api.response_items import ResponseItems
from leadline.engine.server.api.typed_events import EventWriter
from responses_reader import Reader


def pieces_of(output: list[tuple[str, str]]) -> list[ParsedText]:
    """One piece for each (kind, text): kinds r(easoning), c(ontent), n(ew call), a(rguments)."""
    pieces, calls = [], 0
    for kind, text in output:
        if kind == "r":
            pieces.append(ParsedText(reasoning=text))
        elif kind == "c":
            pieces.append(ParsedText(text))
        elif kind == "n":
            pieces.append(ParsedText(calls=[CallDelta(calls, f"call_{calls}", "go", text)]))
            calls += 1
        elif calls and pieces[-1].calls:
            pieces.append(ParsedText(calls=[CallDelta(calls - 1, arguments=text)]))
    return pieces


OUTPUTS = st.lists(st.tuples(st.sampled_from("rcna"), st.text(min_size=1)), max_size=12).map(pieces_of)


def played(pieces: list[ParsedText], *, earlier: int = 0, cut: bool = False) -> tuple[ResponseItems, bytes]:
    writer = EventWriter(notes=False)
    items = ResponseItems(writer, lambda part: f"id-{part}")
    with writer.muted():
        for piece in pieces[:earlier]:
            items.add(piece)
    for piece in pieces[earlier:]:
        items.add(piece)
    items.finish(cut=cut)
    return items, writer.take()


@given(OUTPUTS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_output_gives_events_that_a_strict_client_takes(pieces: list[ParsedText], cut: bool) -> None:
    items, data = played(pieces, cut=cut)
    reader = Reader()
    reader.read(data)
    assert reader.open is None
    plain = [json.loads(json.dumps(item)) for item in reader.items]
    assert [item["type"] for item in plain] == [item.__struct_config__.tag for item in items.done]
    assert plain[-1]["status"] == ("incomplete" if cut else "completed")
    assert all(item["status"] == "completed" for item in plain[:-1])

    def told(kind: str) -> str:
        found = [item for item in plain if item["type"] == kind]
        return "".join(
            item["arguments"] if kind == "function_call" else item["content"][0]["text"] for item in found
        )

    assert told("message") == "".join(piece.content for piece in pieces)
    assert told("reasoning") == "".join(piece.reasoning for piece in pieces)
    assert told("function_call") == "".join(part.arguments for piece in pieces for part in piece.calls)


@given(OUTPUTS, st.data())
@settings(max_examples=80, deadline=None)
def test_an_output_that_another_pod_began_goes_on_with_the_same_bytes(
    pieces: list[ParsedText], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(pieces)))
    whole, rest = played(pieces)[1], played(pieces, earlier=cut)[1]
    assert whole.endswith(rest)


def test_more_arguments_come_before_text_of_the_same_piece_and_new_calls_behind_it() -> None:
    pieces = [
        ParsedText(calls=[CallDelta(0, "call_0", "go", "{")]),
        ParsedText("so", [CallDelta(0, arguments="}"), CallDelta(1, "call_1", "go", "{}")]),
    ]
    items, _ = played(pieces)
    assert [item.__struct_config__.tag for item in items.done] == [
        "function_call",
        "message",
        "function_call",
    ]
    assert items.done[0].arguments == "{}"  # type: ignore[union-attr]
