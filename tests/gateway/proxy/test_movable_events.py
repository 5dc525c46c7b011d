"""Streams of named events that move between pods, by the notes of stream_notes, without any server."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.gateway.request.dialects import DIALECTS
from leadline.gateway.request.events import MovableEvents
from leadline.protocol.stream_notes import END, Note, lost_note, read_note, tokens_note, usage_note


def named(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()


GROUPS: list[tuple[list[int], list[bytes]]] = [
    ([11, 12], [named("delta", '{"text":"a"}')]),
    ([13], []),  # half a character: no event
    ([14], [named("delta", '{"text":"é"}'), named("delta", '{"arguments":"{"}')]),
    ([15], [named("delta", '{"text":"\\n: end"}')]),
]
OPENING = [named("created", "{}"), named("in_progress", "{}")]
CLOSING = [named("done", "{}"), named("completed", '{"usage":1}')]


def pod_bytes(resumed: list[int]) -> bytes:
    """What an engine writes that goes on behind the tokens `resumed`."""
    out = [*OPENING, tokens_note([])]
    at = 0
    for ids, events in GROUPS:
        at += len(ids)
        if at > len(resumed):
            out += [*events, tokens_note(ids)]
    return b"".join([*out, *CLOSING[:-1], usage_note(7, 5, 2), CLOSING[-1], END])


WHOLE = b"".join([*OPENING, *(event for _, events in GROUPS for event in events), *CLOSING])


@pytest.mark.parametrize("cut", range(len(pod_bytes([])) + 1))
def test_a_stream_cut_at_any_byte_goes_on_with_the_same_bytes(cut: int) -> None:
    stream = MovableEvents()
    got = stream.push(pod_bytes([])[:cut])
    if not stream.done:
        fields = stream.resume()
        assert stream.closing() is None
        got += stream.push(pod_bytes(fields["resume_token_ids"]))  # type: ignore[arg-type]
    assert got == WHOLE
    assert stream.done
    assert stream.sent_tokens == 5
    usage = stream.usage_so_far
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 5, 12)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 2


@given(st.lists(st.integers(0, len(pod_bytes([]))), max_size=6).map(sorted))
@settings(max_examples=50, deadline=None)
def test_any_pieces_give_the_same_bytes(cuts: list[int]) -> None:
    data, stream = pod_bytes([]), MovableEvents()
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert b"".join(map(stream.push, pieces)) == WHOLE


def test_the_tokens_that_a_client_resumed_with_stay_in_front() -> None:
    stream = MovableEvents([1, 2])
    stream.push(b"".join([*OPENING, tokens_note([]), named("delta", "{}"), tokens_note([3])]))
    assert stream.resume() == {"resume_token_ids": [1, 2, 3], "resume_events": 3}


def test_a_pod_that_lost_its_engine_is_replaced_and_what_was_held_is_dropped() -> None:
    stream = MovableEvents()
    cut = b"".join([*OPENING, tokens_note([]), named("delta", "half"), lost_note("the core\nis gone")])
    assert stream.push(cut) == b"".join(OPENING)
    assert stream.lost == "the core is gone"
    assert stream.resume() == {"resume_token_ids": [], "resume_events": 2}
    assert stream.push(pod_bytes([])) == WHOLE.removeprefix(b"".join(OPENING))


def test_only_whole_notes_are_notes() -> None:
    assert read_note(tokens_note([5, 6])) == Note(tokens=(5, 6))
    assert read_note(tokens_note([])) == Note(tokens=())
    assert read_note(END) == Note(ends=True)
    for comment in (
        b": ping\n\n",
        b": tokens 1,x\n\n",
        b": usage 1 2\n\n",
        b": end soon\n\n",
        b"data: x\n\n",
    ):
        assert read_note(comment) is None


def test_a_response_is_whole_with_its_usage_not_with_a_tools_field_of_that_name() -> None:
    is_whole = DIALECTS["/v1/responses"].is_whole
    tool = '{"tools":[{"parameters":{"properties":{"usage":{"type":"string"}}}}],"usage":%s}'
    opening = named("response.created", '{"response":%s}' % (tool % "null"))
    assert not is_whole(opening)
    done = named("response.completed", '{"response":%s}' % (tool % '{"input_tokens":3,"output_tokens":2}'))
    assert is_whole(opening + done)
