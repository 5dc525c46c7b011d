"""A tokenizer in one message is the tokenizer, and bytes that are none are refused by name."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.protocol.errors import UnsupportedModel
from leadline.protocol.text import bundle as module
from leadline.protocol.text.bundle import bundle_digest, encode_bundle, load_bundle
from leadline.protocol.text.chat import ChatRenderer
from leadline.protocol.text.tokenizer import Tokenizer

TEXTS = [
    "",
    "  Hello   world\n\n\t1234567 3.14",
    "<|im_start|>user\nnaïve café 東京 🙂 </s><s><unk>",
    "İstanbul\u0301 ﬁ ① \u200d",
]
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


@pytest.fixture(params=["smollm_folder", "sentencepiece_folder"])
def original(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.load(request.getfixturevalue(request.param))


def test_a_bundle_is_the_tokenizer_it_was_made_of(original: Tokenizer) -> None:
    data = encode_bundle(original)
    copy, renderer = load_bundle(data)
    for text in TEXTS:
        for special in (True, False):
            ids = original.encode(text, special)
            assert copy.encode(text, special) == ids
            assert copy.decode(ids) == original.decode(ids)
    assert copy.vocab_size == original.vocab_size
    assert copy.special_ids == original.special_ids
    assert copy.special_tokens == original.special_tokens
    assert copy.eos_token_ids == original.eos_token_ids
    assert copy.pieces.longest == original.pieces.longest
    if original.chat_templates:
        ours = ChatRenderer(original.chat_templates, original.special_tokens)
        assert renderer.render(TALK) == ours.render(TALK)
    # A bundle of a bundle is the same.
    assert bundle_digest(encode_bundle(copy)) == bundle_digest(data)


def made(tokenizer: bytes, specials: object = None, templates: object = None, **fields: object) -> bytes:
    return msgspec.msgpack.encode(
        {
            "format": module.FORMAT,
            "tokenizer": tokenizer,
            "special_tokens": {} if specials is None else specials,
            "chat_templates": {} if templates is None else templates,
            **fields,
        }
    )


def valid() -> bytes:
    return json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}).encode()


def test_the_smallest_tokenizer_there_is_loads() -> None:
    tokenizer, _ = load_bundle(made(valid(), {"bos_token": "a", "x": "a"}))
    assert tokenizer.encode("aa") == [0, 0]
    assert tokenizer.special_tokens == {"bos_token": "a", "x": "a"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<html>",
        msgspec.msgpack.encode([1, 2]),
        made(b"{}"),
        made(b"not json"),
        made(b"\xff\xfe"),
        made(b"[" * 100_000),
        made(
            json.dumps(
                {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}
            ).encode()
        ),
        made(json.dumps({"version": "1.0", "model": {"type": "Pickle", "data": "gASVAAAA"}}).encode()),
        made(valid(), {"bos_token": 5}),
        made(valid(), {"added_tokens_decoder": {"1": {"content": "x"}}}),
        made(valid(), {}, {"default": "{% if %}"}),
        made(valid(), {}, {"default": 5}),
        made(valid(), {}, {"default": "{{ 'a' * 10**10 }}"}),
        made(valid(), {f"t{i}": "a" for i in range(2000)}),
        made(valid(), format="leadline-tokenizer-2"),
        made(valid())[:-3],
    ],
)
def test_bytes_that_are_no_bundle_are_refused(data: bytes) -> None:
    with pytest.raises(UnsupportedModel):
        load_bundle(data)


def test_a_bundle_that_is_too_large_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BUNDLE_BYTES", 100)
    with pytest.raises(UnsupportedModel, match="exceeds the limit of 100"):
        load_bundle(made(valid()))


@given(st.binary(max_size=200), st.integers(0, 10_000), st.integers(1, 20))
def test_damage_is_refused_or_harmless(smallest: bytes, at: int, length: int) -> None:
    data = made(valid(), {"bos_token": "a"}, {"default": "{{ messages }}"})
    at %= len(data)
    damaged = data[:at] + smallest[:length] + data[at + length :]
    try:
        tokenizer, _ = load_bundle(damaged)
    except UnsupportedModel:
        return
    tokenizer.encode("aa")


def test_a_template_runs_in_the_sandbox() -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    _, renderer = load_bundle(made(valid(), {}, {"default": escape}))
    with pytest.raises(Exception, match="unsafe"):
        renderer.render(TALK)
