"""Texts are cut only where the parts tokenize as the whole does."""

from __future__ import annotations

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from leadline.gateway.tokens.segments import Segmenter, special_affixes
from leadline.protocol.text.tokenizer import Tokenizer

SPECIALS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
]
AWKWARD = [
    "<l>",
    "<r>",
    "<w>",
    "word",
    "<<|",
    "<|im_start|>user",
    "a b",
    "  ",
    "<|turn|>",
    "<tool_call>",
    "<",
]
PLAIN = [
    "a",
    "b",
    " ",
    "\n",
    "\n\n",
    "It's",
    "123",
    " 4567",
    "é",
    "e\u0301",
    "東京",
    "🙂",
    "_",
    ".",
    "\t",
    "user",
    "▁",
]

texts = st.lists(st.sampled_from(SPECIALS + AWKWARD + PLAIN) | st.text(max_size=4), max_size=30).map("".join)


def joined(tokenizer: Tokenizer, parts: list[str]) -> list[int]:
    return [token for ids in tokenizer.encode_batch(parts) for token in ids]


_segmenters: dict[tuple[int, int], Segmenter] = {}


def segmenter_of(tokenizer: Tokenizer, chunk: int) -> Segmenter:
    key = (id(tokenizer), chunk)
    if key not in _segmenters:
        _segmenters[key] = Segmenter(tokenizer, chunk=chunk)
    return _segmenters[key]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts, chunk=st.sampled_from([1, 5, 4096]))
@example(text="<r>  <|im_end|>  <l> <|im_end|>word<|im_end|>", chunk=1)
@example(text="x<<|im_start|>user a b<|im_start|>users", chunk=1)
@example(text="one two three a b c d e's f", chunk=1)
def test_parts_tokenize_as_the_whole(any_tokenizer, text, chunk):
    parts = segmenter_of(any_tokenizer, chunk).cut(text)
    assert "".join(parts) == text
    assert joined(any_tokenizer, parts) == any_tokenizer.encode(text, add_special_tokens=False)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts, more=texts, chunk=st.sampled_from([5, 4096]))
def test_a_longer_text_is_cut_as_the_shorter_one_it_begins_with(tokenizers_by_family, text, more, chunk):
    segmenter = segmenter_of(tokenizers_by_family["qwen"], chunk)
    before = segmenter.cut(text + "<|im_end|>")[:-1]
    after = segmenter.cut(text + "<|im_end|>" + more)
    assert after[: len(before)] == before


def test_chats_are_cut_at_their_messages(tokenizer):
    segmenter = Segmenter(tokenizer)
    assert segmenter.specials
    assert segmenter.cut("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n") == [
        "<|im_start|>user\nHi",
        "<|im_end|>\n",
        "<|im_start|>assistant\n",
    ]


def test_long_stretches_are_cut_between_words_where_the_pre_tokenizer_is_known(tokenizers_by_family):
    text = "The quick brown fox jumps over the lazy dog. " * 1000
    for family in ("smollm", "llama3", "qwen"):
        parts = Segmenter(tokenizers_by_family[family]).cut(text)
        assert 5 < len(parts) < 12
        assert joined(tokenizers_by_family[family], parts) == tokenizers_by_family[family].encode(text, False)
    for family in ("sentencepiece", "metaspace", "awkward"):
        assert Segmenter(tokenizers_by_family[family]).cut(text) == [text]


def test_an_added_token_that_strips_or_stands_alone_is_no_place_to_cut(tokenizers_by_family):
    segmenter = Segmenter(tokenizers_by_family["awkward"])
    assert segmenter.cut("x <l>y <w> z") == ["x <l>y <w> z"]
    assert segmenter.cut("x<|im_end|>y<r> z") == ["x", "<|im_end|>y", "<r> z"]


def test_a_longer_token_that_starts_earlier_hides_the_one_inside(tokenizers_by_family):
    assert Segmenter(tokenizers_by_family["awkward"]).cut("x<<|im_start|>y") == ["x", "<<|im_start|>y"]


class Contrary(Tokenizer):
    """A tokenizer whose parts do not add up: it counts texts."""

    def encode_batch(self, texts):
        return [[*ids, 7] for ids in super().encode_batch(texts)]


def test_a_tokenizer_that_does_not_agree_with_its_cuts_is_never_cut(smollm_folder):
    segmenter = Segmenter(Contrary.load(smollm_folder))
    assert not segmenter.specials
    assert not segmenter.words
    assert segmenter.cut("<|im_start|>a<|im_end|>") == ["<|im_start|>a<|im_end|>"]


def test_special_tokens_around_a_text_are_known(tokenizers_by_family):
    assert special_affixes(tokenizers_by_family["smollm"]) == ([], [])
    assert special_affixes(tokenizers_by_family["llama3"]) == ([49152], [])
    assert special_affixes(tokenizers_by_family["sentencepiece"]) == ([1], [])
