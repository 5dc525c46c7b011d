"""Words looked up one by one give what the tokenizer gives for the whole text."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leadline.gateway.tokens.encoder import WordMemo
from leadline.gateway.tokens.segments import Segmenter

words = st.sampled_from(
    ["the", "Sailor", " ", "'s", "x", "don't", "12", "\n", "é", "e\u0301", "_", ".", "ÀB", "\u3000"]
)
texts = st.lists(words | st.text(max_size=6), max_size=30).map(" ".join)


@pytest.mark.parametrize("family", ["smollm", "llama3", "qwen"])
@pytest.mark.parametrize("most", [5, 1000])
def test_any_text_comes_out_as_the_tokenizer_has_it(tokenizers_by_family, family, most):
    tokenizer = tokenizers_by_family[family]
    assert Segmenter(tokenizer).words
    memo = WordMemo(tokenizer, most)

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(text=texts)
    def encoded(text: str) -> None:
        packed, _ = memo.encode(text)
        assert memoryview(packed).cast("I").tolist() == tokenizer.encode(text, add_special_tokens=False)
        assert len(memo) <= most

    encoded()


def test_more_new_words_at_once_than_may_be_kept(tokenizer):
    memo = WordMemo(tokenizer, 3)
    text = "one two three four five six"
    packed, _ = memo.encode(text)
    assert memoryview(packed).cast("I").tolist() == tokenizer.encode(text, add_special_tokens=False)
    assert len(memo) == 3


def test_words_that_are_known_are_not_tokenized_again(tokenizer):
    memo = WordMemo(tokenizer)
    memo.encode("The sailor sings")
    assert memo.encode("The sailor sings sings sailor")[1] == 0
    packed, encoded = memo.encode("The sailor sings now")
    assert 0 < encoded < len(packed) // 4


def test_a_text_of_unknown_words_is_learned_bit_by_bit(tokenizer):
    memo = WordMemo(tokenizer)
    text = " ".join(f"{a}{b}{c}" for a in "klm" for b in "aeiou" for c in "xyz")
    _, whole = memo.encode(text)
    known = len(memo)
    assert 0 < known < 45
    assert whole == len(tokenizer.encode(text, add_special_tokens=False))
    while memo.encode(text)[1]:
        assert len(memo) > known
        known = len(memo)
    assert known == 45
