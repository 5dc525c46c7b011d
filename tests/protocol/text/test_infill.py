"""Prompts with a suffix, in each form; the same at an engine and at a gateway."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from leadline.protocol.errors import RequestError
from leadline.protocol.openai import CompletionRequest, InvalidBody, decode_body
from leadline.protocol.text.chat import ChatRenderer
from leadline.protocol.text.infill import infill_ends, infill_ids
from leadline.protocol.text.prompts import prompt_inputs
from leadline.protocol.text.tokenizer import Tokenizer

WORDS = ["▁def", "▁f", "return", "▁a", "▁", "def", "f", "a"]


def byte_level(*markers: str) -> Tokenizer:
    """Of single bytes, with these special tokens behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in markers])
    return Tokenizer(backend, {}, {}, Path())


def metaspace(*markers: str) -> Tokenizer:
    """As SentencePiece makes it: a space in front of each text, a byte for each letter that is no word."""
    names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, *markers]
    vocabulary = [(name, -float(i)) for i, name in enumerate(names)]
    backend = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.add_special_tokens([tokenizers.AddedToken("<s>", special=True)])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend, {"bos_token": "<s>"}, {}, Path())


@pytest.mark.parametrize(
    "markers",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ],
)
def test_most_models_read_the_text_before_then_the_text_after(markers):
    tokenizer = byte_level(*markers)
    text = f"{markers[0]}def f{markers[1]} a{markers[2]}"
    assert infill_ids("def f", " a", tokenizer, special=True) == tokenizer.encode(text)
    assert infill_ends(tokenizer) == (256, 257, 258)


def test_codellama_has_a_space_before_the_first_text_alone():
    tokenizer = metaspace("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    ids = infill_ids("def f", "return a", tokenizer, special=True)
    shown = [tokenizer.entry(token) for token in ids]
    assert shown == ["<s>", "▁<PRE>", "▁def", "▁f", "▁<SUF>", "return", "▁a", "▁<MID>"]
    assert tokenizer.token_id("▁<EOT>") in infill_ends(tokenizer)
    assert infill_ids("def f", "return a", tokenizer, special=False) == ids[1:]


def test_codestral_reads_the_text_after_first():
    tokenizer = metaspace("[PREFIX]", "[SUFFIX]")
    ids = infill_ids("def f", "return a", tokenizer, special=True)
    shown = [tokenizer.entry(token) for token in ids]
    assert shown == ["<s>", "[SUFFIX]", "return", "▁a", "[PREFIX]", "▁def", "▁f"]


def test_token_ids_stand_as_they_are():
    tokenizer = byte_level("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    assert infill_ids([7, 8], "", tokenizer, special=True) == [256, 7, 8, 257, 258]


def test_a_model_without_markers_refuses_a_suffix():
    with pytest.raises(RequestError, match="suffix needs a model with fill-in-the-middle tokens") as caught:
        infill_ids("a", "b", byte_level("<fim_prefix>"), special=True)
    assert caught.value.param == "suffix"


def test_each_prompt_of_a_request_gets_the_suffix():
    tokenizer = byte_level("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    request = decode_body(b'{"prompt": ["a", "b"], "suffix": "c"}', CompletionRequest)
    prompts = prompt_inputs(request, ChatRenderer({}, {}), tokenizer)
    assert [prompt.content for prompt in prompts] == [
        infill_ids(text, "c", tokenizer, special=True) for text in "ab"
    ]


@pytest.mark.parametrize("more", [b'"echo": true', b'"truncate_prompt_tokens": 3'])
def test_what_would_cut_or_repeat_the_markers_is_refused(more):
    with pytest.raises(InvalidBody, match="neither echo nor truncate_prompt_tokens"):
        decode_body(b'{"prompt": "a", "suffix": "c", %s}' % more, CompletionRequest)
