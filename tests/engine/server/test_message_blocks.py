"""Blocks of a Messages answer: any sequence of pieces gives events in the specified order, which add up to
the blocks of the whole answer, wherever another pod takes over."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from leadline.engine.frontend.tool_formats import CallDelta, ParsedText
from leadline.engine.server.api.message_blocks import BlockEvents, BlockList
from leadline.engine.server.api.typed_events import EventWriter

TEXTS = st.text('ab{}\n"é', max_size=6)


@st.composite
def outputs(draw: st.DrawFn) -> list[ParsedText]:
    """Pieces as parsers give them: calls are numbered, the parts of one follow each other."""
    pieces: list[ParsedText] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "call", "more", "both", "nothing", "thought"]))):
        piece = ParsedText()
        if kind in ("text", "both"):
            piece.content = draw(TEXTS)
        if kind == "thought":
            piece.reasoning = draw(TEXTS)
        if kind in ("call", "both"):
            piece.calls.append(CallDelta(calls, f"call_{calls}", f"f{calls}", draw(TEXTS)))
            calls += 1
        if kind == "more" and pieces and pieces[-1].calls:
            piece.calls.append(CallDelta(calls - 1, arguments=draw(TEXTS)))
        pieces.append(piece)
    return pieces


def name_of(part: str) -> str:
    return f"<{part}>"


def written(pieces: Sequence[ParsedText], *, earlier: int = 0, shows_thinking: bool = True) -> bytes:
    """The events of the pieces behind the first `earlier`, which another pod has written."""
    writer = EventWriter(notes=False)
    events = BlockEvents(writer, name_of, shows_thinking=shows_thinking)
    with writer.muted():
        events.add(pieces[:earlier])
    for piece in pieces[earlier:]:
        events.add([piece])
    events.close()
    return writer.take()


def data(stream: bytes) -> Iterator[dict[str, Any]]:
    for event in stream.decode().split("\n\n")[:-1]:
        name, content = event.split("\n")
        parsed = json.loads(content.removeprefix("data: "))
        assert name == f"event: {parsed['type']}"
        yield parsed


def put_together(stream: bytes) -> list[dict[str, Any]]:
    """The blocks that a client makes of events; AssertionError where they are out of order."""
    made: list[dict[str, Any]] = []
    is_open = False
    for event in data(stream):
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(made)
            made.append(event["content_block"])
            is_open = True
            continue
        assert is_open
        assert event["index"] == len(made) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            continue
        block, delta = made[-1], event["delta"]
        assert "signature" not in block or not block["signature"]
        match delta["type"]:
            case "text_delta":
                block["text"] += delta["text"]
            case "thinking_delta":
                block["thinking"] += delta["thinking"]
            case "signature_delta":
                block["signature"] = delta["signature"]
            case "input_json_delta":
                block["input"] = (block["input"] or "") + delta["partial_json"]
    assert not is_open
    return made


def whole(pieces: Sequence[ParsedText], *, shows_thinking: bool = True) -> list[dict[str, Any]]:
    blocks = BlockList(name_of, shows_thinking=shows_thinking)
    for piece in pieces:
        blocks.add([piece])
    made: list[dict[str, Any]] = json.loads(msgspec.json.encode(blocks.blocks()))
    return made


def as_input(text: str) -> dict[str, Any]:
    """A call's arguments as the whole answer has them."""
    try:
        value = json.loads(text) if text.strip() else {}
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


@given(outputs(), st.booleans())
def test_events_add_up_to_the_whole_answer(pieces: list[ParsedText], shown: bool) -> None:
    made = put_together(written(pieces, shows_thinking=shown))
    for block in made:
        if block["type"] == "tool_use":
            block["input"] = as_input(block["input"] or "")
    assert made == whole(pieces, shows_thinking=shown)


@given(outputs())
def test_nothing_is_lost_and_the_order_is_the_models(pieces: list[ParsedText]) -> None:
    made = whole(pieces)
    text = "".join(block.get("text", "") for block in made)
    assert text == "".join(piece.content for piece in pieces)
    begun = [part for piece in pieces for part in piece.calls if part.id is not None]
    calls = [block for block in made if block["type"] == "tool_use"]
    assert [(call["id"], call["name"]) for call in calls] == [
        (f"toolu_{part.index}", part.name) for part in begun
    ]
    kinds = [block["type"] for block in made]
    assert not any(a == b != "tool_use" for a, b in itertools.pairwise(kinds))


@given(outputs(), st.data())
def test_another_pod_goes_on_with_the_same_bytes(pieces: list[ParsedText], choose: st.DataObject) -> None:
    at = choose.draw(st.integers(0, len(pieces)))
    assert written(pieces).endswith(written(pieces, earlier=at))


def test_arguments_behind_a_text_of_the_same_piece_are_those_of_the_open_call() -> None:
    """A piece of several tokens may end one call, say something and begin the next."""
    pieces = [
        ParsedText(calls=[CallDelta(0, "call_a", "f", '{"n":')]),
        ParsedText("So", [CallDelta(0, arguments="1}"), CallDelta(1, "call_b", "g", "{}")]),
    ]
    assert [block.get("input", block.get("text")) for block in whole(pieces)] == [{"n": 1}, "So", {}]


def test_a_models_own_call_id_stays_as_it_is() -> None:
    assert whole([ParsedText(calls=[CallDelta(0, "fn.go:0", "go", "{}")])])[0]["id"] == "fn.go:0"
