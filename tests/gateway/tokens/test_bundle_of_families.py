"""A tokenizer that came as a bundle gives the ids of the original, for tokenizers of six kinds."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leadline.protocol.text.bundle import encode_bundle, load_bundle
from leadline.protocol.text.tokenizer import Tokenizer

_COPIES: dict[int, Tokenizer] = {}
PIECES = [
    "<|im_start|>",
    "<|eot_id|>",
    "<l>",
    "<r> ",
    "word",
    " a b ",
    "<s>",
    "é\u0301",
    "東京",
    "  \n",
    "12345",
    "'s",
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=8).map("".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(text=TEXTS, special=st.booleans())
def test_a_copy_by_bundle_gives_the_same_ids(any_tokenizer: Tokenizer, text: str, special: bool) -> None:
    copy = _COPIES.get(id(any_tokenizer))
    if copy is None:
        copy = _COPIES[id(any_tokenizer)] = load_bundle(encode_bundle(any_tokenizer))[0]
    assert copy.encode(text, special) == any_tokenizer.encode(text, special)
