"""Incremental text equals the full decode, and never shows part of a character (row E2)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from leadline.engine.frontend.detokenizer import Detokenizer
from leadline.protocol.text.pieces import JoinKind, LeadingSpace
from leadline.protocol.text.tokenizer import Tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"])) | st.text("😀👩‍👩‍👧🇩🇪東京ありがとう한국어é \n")


def pieces_of(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """Push `ids` in groups of the sizes in `cuts` (repeated), then finish."""
    texts, at, turn = [], 0, 0
    while at < len(ids):
        size = cuts[turn % len(cuts)]
        texts.append(detokenizer.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*texts, detokenizer.finish()]


# Common ids, single-byte ids and special ones, so that broken and split characters are frequent.
TOKEN_IDS = st.lists(st.integers(0, 300) | st.integers(0, 49151), max_size=40)
CUTS = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@given(ids=TOKEN_IDS, cuts=CUTS, skip=st.booleans())
@settings(max_examples=500, deadline=None)
def test_increments_of_any_token_sequence_add_up_to_the_full_decode(tokenizer, ids, cuts, skip):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    assert "".join(pieces_of(detokenizer, ids, cuts)) == tokenizer.decode(ids, skip)


@given(text=TEXT, cuts=CUTS)
@settings(max_examples=300, deadline=None)
def test_text_comes_back_without_replacement_characters(tokenizer, text, cuts):
    ids = tokenizer.encode(text, add_special_tokens=False)
    # SmolLM2's vocabulary lacks a few bytes (some control characters); encoding drops them.
    assume(b"".join(map(tokenizer.token_bytes, ids)) == text.encode())
    texts = pieces_of(Detokenizer(tokenizer), ids, cuts)
    assert "".join(texts) == text
    assert texts[-1] == ""
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in texts)


@given(text=TEXT, cuts=CUTS)
@settings(max_examples=300, deadline=None)
def test_sentencepiece_text_comes_back_with_its_spaces(sentencepiece, text, cuts):
    assert sentencepiece.pieces.kind is JoinKind.METASPACE
    assert sentencepiece.pieces.leading is LeadingSpace.STRIP_ONE
    ids = sentencepiece.encode(text, add_special_tokens=False)
    assert "".join(pieces_of(Detokenizer(sentencepiece), ids, cuts)) == sentencepiece.decode(ids)


@given(words=st.lists(st.sampled_from(["the", "fox", "東", "sun", "<s>", "😀"]), max_size=8), cuts=CUTS)
@settings(max_examples=200, deadline=None)
def test_sentencepiece_output_after_a_prompt_is_the_difference_of_two_decodes(sentencepiece, words, cuts):
    prompt = sentencepiece.encode("the quick brown")
    ids = sentencepiece.encode(" ".join(words), add_special_tokens=False)
    detokenizer = Detokenizer(sentencepiece, prompt_token_ids=prompt)
    text = "".join(pieces_of(detokenizer, ids, cuts))
    assert sentencepiece.decode(prompt, True) + text == sentencepiece.decode(prompt + ids, True)


def test_a_prompt_of_special_tokens_only_is_no_context_for_a_leading_space(sentencepiece):
    ids = sentencepiece.encode("the fox", add_special_tokens=False)
    after_bos = Detokenizer(sentencepiece, prompt_token_ids=[sentencepiece.bos_token_id])
    after_text = Detokenizer(sentencepiece, prompt_token_ids=sentencepiece.encode("the"))
    assert after_bos.push(ids) == "the fox"
    assert after_text.push(ids) == " the fox"


@pytest.mark.parametrize("text", ["😀", "🜚", "東", "👩‍👩‍👧"])
def test_a_character_split_over_tokens_is_held_until_it_is_whole(tokenizer, text):
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    seen = ""
    for token_id in ids:
        seen += detokenizer.push([token_id])
        assert text.startswith(seen)
    assert seen == text
    assert detokenizer.finish() == ""


def test_output_that_ends_inside_a_character_ends_in_one_replacement_character(tokenizer):
    ids = tokenizer.encode("ok 🜚")
    detokenizer = Detokenizer(tokenizer)
    assert "\ufffd" not in detokenizer.push(ids[:-1])
    assert detokenizer.finish() == "\ufffd"


def test_broken_bytes_do_not_hold_back_what_follows(tokenizer):
    first_byte = tokenizer.encode("🜚")[0]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([first_byte]) in ("", "\ufffd")
    assert detokenizer.push(tokenizer.encode("x")).endswith("x")


def wordpiece() -> Tokenizer:
    """A decoder of the kind that inserts spaces itself."""
    words = ["[UNK]", "play", "##ing", "##ed", "games", ",", "dis", "##play", "[SEP]"]
    backend = Backend(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return Tokenizer(backend, {"sep_token": "[SEP]"}, {}, Path())


@given(ids=st.lists(st.integers(0, 8), max_size=20), cuts=CUTS, skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_an_opaque_decoder_is_followed_through_a_window(ids, cuts, skip):
    tokenizer = wordpiece()
    assert tokenizer.pieces.kind is JoinKind.OPAQUE
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    assert "".join(pieces_of(detokenizer, ids, cuts)) == tokenizer.decode(ids, skip)


def test_an_opaque_decoder_with_byte_pieces_shows_no_part_of_a_character():
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"x": 256}
    backend = Backend(models.BPE(vocab, []))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(backend, {}, {}, Path())
    assert tokenizer.pieces.kind is JoinKind.OPAQUE
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([byte]) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert detokenizer.push([256, *"東".encode()[:2]]) == "x"
    assert detokenizer.finish() == "\ufffd\ufffd", "the library shows one for each byte"


def test_the_metaspace_decoder_drops_the_space_of_the_first_piece_only():
    backend = Backend(models.BPE({"▁a": 0, "▁": 1, "b": 2, "▁▁": 3}, []))
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer = Tokenizer(backend, {}, {}, Path())
    for ids in ([0, 0, 2], [1, 1, 0], [3, 0], [2, 0], [3]):
        assert "".join(pieces_of(Detokenizer(tokenizer), ids, [1])) == tokenizer.decode(ids)
