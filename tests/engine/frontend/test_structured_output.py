"""Grammar masks: what is allowed is what the grammar allows, and EOS only when it is complete (row E16)."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from leadline.engine.errors import RequestError
from leadline.engine.frontend.structured import GrammarCompiler, Matcher
from leadline.engine.sampling_params import StructuredSpec

EOS = 2
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def allowed(matcher: Matcher, words: int) -> list[int]:
    out = np.full(words, -1, dtype=np.int32)
    matcher.mask(out)
    return np.flatnonzero(np.unpackbits(out.view(np.uint8), bitorder="little")).tolist()


def follow(compiler: GrammarCompiler, spec: StructuredSpec, ids: list[int]) -> Matcher:
    """Each token must be in the mask, and accepted."""
    matcher = compiler.matcher(spec)
    for token_id in ids:
        assert token_id in allowed(matcher, compiler.mask_words)
        assert matcher.accept(token_id)
    return matcher


def walk(
    compiler: GrammarCompiler, tokenizer, spec: StructuredSpec, seed: int, limit: int = 400
) -> str | None:
    """A random sequence of allowed tokens up to EOS (preferring EOS, then short tokens); None if too long."""
    rng = random.Random(seed)
    matcher, ids = compiler.matcher(spec), []
    for _ in range(limit):
        choices = allowed(matcher, compiler.mask_words)
        assert choices
        if EOS in choices:
            assert matcher.accept(EOS)
            assert matcher.finished
            return tokenizer.decode(ids)
        closing = [i for i in choices if any(c in tokenizer.token_str(i) for c in '"},]')]
        token_id = rng.choice(closing if closing and rng.random() < 0.5 else choices)
        assert matcher.accept(token_id)
        ids.append(token_id)
    return None


@pytest.mark.parametrize("seed", range(15))
def test_any_walk_through_a_schema_ends_in_a_document_that_matches_it(compiler, tokenizer, seed):
    text = walk(compiler, tokenizer, StructuredSpec("json_schema", json.dumps(PERSON)), seed)
    assert text is not None
    document = json.loads(text)
    assert set(document) == {"name", "age"}
    assert isinstance(document["age"], int)
    assert len(document["name"]) <= 12


@pytest.mark.parametrize("seed", range(10))
def test_any_walk_through_a_regex_matches_it(compiler, tokenizer, seed):
    pattern = r"(yes|no), [0-9]{2,5}(\.[0-9])?!"
    text = walk(compiler, tokenizer, StructuredSpec("regex", pattern), seed)
    assert re.fullmatch(pattern, text)


def test_a_json_object_may_be_anything_but_must_be_an_object(compiler, tokenizer):
    spec = StructuredSpec("json_object")
    text = '{"a": [1, 2.5e3, null, true], "b": {"c": "é 😀"}}'
    matcher = follow(compiler, spec, tokenizer.encode(text))
    assert EOS in allowed(matcher, compiler.mask_words)
    start = compiler.matcher(spec)
    assert not start.accept(tokenizer.encode("[1]")[0])
    assert not start.accept(tokenizer.encode("Sure")[0])
    assert start.accept(tokenizer.encode('{"')[0]), "a refused token leaves the matcher where it was"


@pytest.mark.parametrize("depth", [200, 500, 900])
def test_a_schema_that_is_nested_too_deeply_is_refused(compiler, depth):
    schema = '{"properties":{"a":' * depth + '{"format":"path"}' + "}}" * depth
    with pytest.raises(
        RequestError, match=r"JSON schema.*cannot be used: .*(nested too deeply|recursion limit)"
    ):
        compiler.validate(StructuredSpec("json_schema", schema))


def test_formats_that_json_schema_says_to_ignore_are_ignored(compiler, tokenizer):
    """What pydantic writes for Path, SecretStr and bytes; a property may have the name of a keyword."""
    schema = {
        "type": "object",
        "properties": {
            "format": {"$ref": "#/$defs/default"},
            "day": {"type": "string", "format": "date"},
            "kind": {"const": {"format": "path"}},
        },
        "required": ["format", "day", "kind"],
        "additionalProperties": False,
        "$defs": {"default": {"anyOf": [{"type": "string", "format": "path"}, {"type": "null"}]}},
    }
    spec = StructuredSpec("json_schema", json.dumps(schema))
    start = '{"format": "no date", "day": "'
    matcher = follow(compiler, spec, tokenizer.encode(start + '2026-11-30", "kind": {"format": "path"}}'))
    assert EOS in allowed(matcher, compiler.mask_words)
    day = follow(compiler, spec, tokenizer.encode(start))
    assert not day.accept(tokenizer.encode("x")[0]), "a format that is known still holds"


def test_a_lark_grammar_works(compiler, tokenizer):
    matcher = follow(
        compiler, StructuredSpec("lark", 'start: "go" (" " /[a-c]+/)?'), tokenizer.encode("go abc")
    )
    assert EOS in allowed(matcher, compiler.mask_words)


def test_eos_is_allowed_exactly_where_the_grammar_is_complete(compiler, tokenizer):
    matcher = compiler.matcher(StructuredSpec("regex", "[0-9]{2,3}"))
    one = tokenizer.encode("1")[0]
    for complete in (False, False, True):
        choices = allowed(matcher, compiler.mask_words)
        assert (EOS in choices) == complete
        assert one in choices
        assert matcher.accept(one)
    assert matcher.finished
    assert allowed(matcher, compiler.mask_words) == [EOS]
    assert not matcher.accept(one)
    assert matcher.accept(EOS)


def test_eos_before_the_end_is_not_accepted(compiler, tokenizer):
    matcher = compiler.matcher(StructuredSpec("regex", "ab"))
    assert not matcher.accept(EOS)
    assert not matcher.finished
    assert matcher.accept(tokenizer.encode("ab")[0])


def test_every_eos_id_of_the_model_ends_it(tokenizer):
    compiler = GrammarCompiler(tokenizer, eos_token_ids=(2, 0))
    matcher = compiler.matcher(StructuredSpec("regex", "a"))
    assert matcher.accept(tokenizer.encode("a")[0])
    assert allowed(matcher, compiler.mask_words) == [0, 2]
    assert matcher.accept(0)


def test_masks_are_as_wide_as_the_models_logits_and_padding_is_forbidden(tokenizer):
    padded = GrammarCompiler(tokenizer, vocab_size=49152 + 100)
    assert padded.mask_words == (49152 + 100 + 31) // 32
    assert max(allowed(padded.matcher(StructuredSpec("regex", r"(?s:.)*")), padded.mask_words)) < 49152


def test_a_wider_buffer_than_needed_is_cleared_to_its_end(compiler):
    out = np.full(compiler.mask_words + 3, -1, dtype=np.int32)
    compiler.matcher(StructuredSpec("json_object")).mask(out)
    assert not out[compiler.mask_words :].any()


def test_matchers_of_one_spec_do_not_share_their_place(compiler, tokenizer):
    spec = StructuredSpec("regex", "ab")
    first, second = compiler.matcher(spec), compiler.matcher(spec)
    assert first.accept(tokenizer.encode("ab")[0])
    assert first.finished
    assert not second.finished


def test_a_bad_spec_is_refused_and_good_ones_go_on_working(compiler):
    for spec in (StructuredSpec("regex", "("), StructuredSpec("json_schema", '{"type": 5}')):
        with pytest.raises(RequestError, match="cannot be used"):
            compiler.matcher(spec)
        compiler.validate(StructuredSpec("regex", "x"))


def test_many_threads_may_compile_at_once(tokenizer):
    compiler = GrammarCompiler(tokenizer)
    specs = [StructuredSpec("regex", f"a{{{i},{i + 2}}}") for i in range(1, 9)] * 3
    with ThreadPoolExecutor(8) as pool:
        matchers = list(pool.map(compiler.matcher, specs))
    assert all(matcher.error is None and not matcher.finished for matcher in matchers)


def test_the_sentencepiece_tokenizer_can_be_constrained_too(sentencepiece):
    compiler = GrammarCompiler(sentencepiece)
    ids = sentencepiece.encode("the fox", add_special_tokens=False)
    matcher = follow(compiler, StructuredSpec("regex", " ?the fox"), ids)
    assert matcher.finished


def test_the_core_builds_its_own_compiler_from_the_folder(smollm_folder, compiler):
    own = GrammarCompiler.from_folder(smollm_folder, vocab_size=49152, eos_token_ids=(2,))
    spec = StructuredSpec("json_schema", json.dumps(PERSON))
    assert allowed(own.matcher(spec), own.mask_words) == allowed(compiler.matcher(spec), compiler.mask_words)
