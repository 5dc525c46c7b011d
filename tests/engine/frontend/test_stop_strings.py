"""Stop strings: nothing of one is ever streamed, whatever the chunks (row E1)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.engine.frontend.detokenizer import StopStrings


def naive(text: str, stops: list[str], include: bool, armed_from: int = 0) -> tuple[str, str | None]:
    """The definition: the stop string complete first (from `armed_from` on); the longest of several."""
    for end in range(armed_from + 1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(
    checker: StopStrings, chunks: list[str], armed: list[bool] | None = None
) -> tuple[list[str], str | None]:
    given_out = []
    for i, chunk in enumerate(chunks):
        text, found = checker.push(chunk, armed=True if armed is None else armed[i])
        given_out.append(text)
        if found is not None:
            return given_out, found
    return [*given_out, checker.flush()], None


AB = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)


@given(chunks=st.lists(AB, max_size=8), stops=STOPS, include=st.booleans())
@settings(max_examples=600, deadline=None)
def test_any_chunking_gives_what_the_definition_gives(chunks, stops, include):
    texts, found = run(StopStrings(stops, include=include), chunks)
    assert ("".join(texts), found) == naive("".join(chunks), stops, include)


@given(before=st.lists(AB, max_size=4), after=st.lists(AB, max_size=4), stops=STOPS, include=st.booleans())
@settings(max_examples=400, deadline=None)
def test_stop_strings_complete_before_min_tokens_do_not_count(before, after, stops, include):
    armed = [False] * len(before) + [True] * len(after)
    texts, found = run(StopStrings(stops, include=include), before + after, armed)
    whole = "".join(before + after)
    expected = naive(whole, stops, include, armed_from=len("".join(before)))
    if found is not None and not include:
        # What was given out while unarmed cannot be taken back, and need not: it is held if it could matter.
        assert expected[0].startswith("".join(texts)) or "".join(texts) == expected[0]
    assert ("".join(texts), found) == expected


@given(chunks=st.lists(AB, max_size=8), stops=STOPS)
@settings(max_examples=300, deadline=None)
def test_no_more_is_held_back_than_could_become_a_stop_string(chunks, stops):
    checker = StopStrings(stops)
    seen = given_out = ""
    for chunk in chunks:
        text, found = checker.push(chunk)
        if found is not None:
            return
        seen, given_out = seen + chunk, given_out + text
        held = seen[len(given_out) :]
        longest = max((k for stop in stops for k in range(len(stop)) if seen.endswith(stop[:k])), default=0)
        assert len(held) == longest


def test_the_alphabet_stops_before_defghij_and_shows_none_of_it():
    texts, found = run(StopStrings(["DEFGHIJ"]), list("ABCDEFGHIJKLMNOP"))
    assert ("".join(texts), found) == ("ABC", "DEFGHIJ")
    assert all("D" not in text for text in texts)


def test_a_tail_that_does_not_become_a_stop_string_is_flushed():
    checker = StopStrings(["DEFGHIJ"])
    assert checker.push("ABCDEF") == ("ABC", None)
    assert checker.push("x") == ("DEFx", None)
    assert checker.push("DE") == ("", None)
    assert checker.flush() == "DE"


def test_the_stop_string_can_be_included():
    assert StopStrings(["\n\n"], include=True).push("a\n\nb") == ("a\n\n", "\n\n")


def test_of_two_stop_strings_the_one_that_is_complete_first_wins():
    assert StopStrings(["abcd", "bc"]).push("xabcd") == ("xa", "bc")
    assert StopStrings(["c", "abc"]).push("xabcd") == ("x", "abc")


def test_without_stop_strings_nothing_is_held():
    assert StopStrings([]).push("anything") == ("anything", None)
