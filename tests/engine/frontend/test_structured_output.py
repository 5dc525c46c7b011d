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


def test_a_grammar_in_gbnf_works_and_a_wrong_one_is_refused(compiler, tokenizer):
    spec = StructuredSpec("lark", 'root ::= "go" tail?\ntail ::= " " [a-c]+')
    matcher = compiler.matcher(spec)
    assert all(matcher.accept(token_id) for token_id in tokenizer.encode("go abc"))
    with pytest.raises(RequestError, match="Expected"):
        compiler.validate(StructuredSpec("lark", "root ::= ("))


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


def schema(value: object) -> StructuredSpec:
    return StructuredSpec("json_schema", value if isinstance(value, str) else json.dumps(value))


def takes(compiler: GrammarCompiler, tokenizer, spec: StructuredSpec, text: str) -> bool:
    """Whether `text` is a whole output of the grammar."""
    matcher = compiler.matcher(spec)
    return all(matcher.accept(token_id) for token_id in tokenizer.encode(text)) and EOS in allowed(
        matcher, compiler.mask_words
    )


def fields(**properties: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


ENDLESS = {"type": "array", "items": {"$ref": "#/$defs/e"}, "minItems": 1}


@pytest.mark.parametrize(
    "spec",
    [
        schema({"$ref": "#"}),
        schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
        schema({"allOf": [{"$ref": "#"}, {"type": "string"}]}),
        schema(fields(a={"$ref": "#"})),
        schema({"$ref": "#/$defs/e", "$defs": {"e": ENDLESS}}),
        schema(fields(a=False)),
        schema({"type": "object", "additionalProperties": False, "required": ["a"]}),
        schema({"enum": []}),
        schema({"type": "array", "minItems": 3, "maxItems": 1}),
        schema({"type": "integer", "minimum": 3, "maximum": 1}),
        schema({"type": "string", "minLength": 3, "maxLength": 1}),
        schema({"allOf": [{"type": "string"}, {"type": "integer"}]}),
        schema({"type": "string", "const": 1}),
        schema({"type": "string", "pattern": r"[^\s\S]"}),
        schema(fields(a={"type": "string", "pattern": "^a$", "minLength": 3})),
        StructuredSpec("regex", r"[^\s\S]"),
        StructuredSpec("regex", r"ab[^\s\S]c"),
        StructuredSpec("lark", "start: start"),
        StructuredSpec("lark", 'start: "a" start'),
        StructuredSpec("lark", "start: a\na: b\nb: a"),
        StructuredSpec("lark", 'start: "a" b{2,3}\nb: ("x" b)+'),
        StructuredSpec("lark", "%llguidance {}\nstart[max_tokens=3]: /a*/ start"),
        StructuredSpec("lark", 'start: "a" B\nB: /[^\\s\\S]/'),
    ],
    ids=lambda spec: spec.value,
)
def test_what_no_text_satisfies_is_refused(compiler, spec):
    for _ in range(2):  # what is refused is not kept
        with pytest.raises(RequestError, match="cannot be used") as refused:
            compiler.validate(spec)
        assert refused.value.code == "invalid_grammar"


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" start | "b"',
        'start: start "a" | "b"',
        "start: x?\nx: x",
        'start: ("a" start)*',
        'start: "(" start ")" | %json {"const": "}"}',
        "start: a{0,2}\na: a",
        '?start: "x"\n  | start "y" // start: start\n',
        "start: A\nA: /a/",
    ],
)
def test_a_recursive_grammar_that_can_end_is_taken(compiler, grammar):
    compiler.validate(StructuredSpec("lark", grammar))


def test_a_part_that_nothing_satisfies_is_forbidden_and_the_rest_is_served(compiler, tokenizer):
    """The model could only go into it and never come out."""
    spec = schema(
        {
            "type": "object",
            "properties": {
                "a": {"anyOf": [{"$ref": "#/$defs/e"}, {"type": "null"}]},
                "b": {"$ref": "#/$defs/e"},
                "next": {"$ref": "#"},
            },
            "$defs": {"e": ENDLESS},
            "additionalProperties": False,
        }
    )
    assert takes(compiler, tokenizer, spec, '{"a": null, "next": {"next": {}}}')
    assert not takes(compiler, tokenizer, spec, '{"a": [[[')
    assert not takes(compiler, tokenizer, spec, '{"b": [')


@pytest.mark.parametrize(
    ("constant", "text"),
    [
        ("1.0", "1"),
        ("-0", "0"),
        ("1E5", "100000"),
        ("1e-7", "0.0000001"),
        ("9007199254740992", "9007199254740992"),
        ("1e22", "1" + "0" * 22),
        (r'"\n\u00e9\"\\/\ud83d\ude00"', '"\\né\\"\\\\/😀"'),
        ('{"b": {"a": [1, 2.50, null]}, "$ref": "#"}', '{"b": {"a": [1, 2.5, null]}, "$ref": "#"}'),
        ("[]", "[]"),
    ],
)
def test_a_constant_comes_out_with_its_value(compiler, tokenizer, constant, text):
    for form in (f'{{"const": {constant}}}', f'{{"enum": [{constant}, "other"]}}'):
        assert takes(compiler, tokenizer, schema(form), text)
    assert json.loads(text) == json.loads(constant)


@pytest.mark.parametrize("number", ["12345678901234567890", "9007199254740993", "-1" + "0" * 400, "1e400"])
def test_a_constant_that_would_come_out_changed_is_refused_by_name(compiler, number):
    nested = f'{{"type": "object", "properties": {{"a": {{"enum": [{{"x": [{number}]}}]}}}}}}'
    for form in (f'{{"const": {number}}}', nested):
        with pytest.raises(RequestError, match=r"(const|enum) holds a number that cannot be kept exact"):
            compiler.validate(schema(form))


TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        ({"type": "object", "propertyNames": TEXT, "additionalProperties": TEXT}, '{"k": "v"}', '{"k": 1'),
        (
            {"type": "object", "propertyNames": {"pattern": "^[a-c]$"}, "additionalProperties": TEXT},
            '{"b": "v"}',
            '{"d',
        ),
        (
            {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": TEXT},
            '{"y": "v"}',
            '{"z',
        ),
        ({"type": "array", "uniqueItems": False, "items": TEXT}, '["a", "a"]', "[1"),
        ({"type": "integer", "minimum": -(2**63)}, "-9223372036854770000", "-9223372036854775809"),
        ({"type": "integer", "maximum": 2**64, "minimum": 0}, "9223372036854770000", "-1"),
        ({"type": "integer", "minimum": -(2**53) - 1}, "-9007199254740992", "-9007199254740994"),
        ({"type": "number", "minimum": -1.797e308, "maximum": 1.797e308}, "-123.5", "9" * 20),
        ({"type": "number", "exclusiveMinimum": True, "minimum": 3}, "3.5", "-"),
        ({"$schema": "https://json-schema.org/draft-07/schema#", "type": "null"}, "null", "1"),
        ({"$schema": "http://json-schema.org/schema", "type": "null"}, "null", "1"),
        ({"$schema": "https://example.com/mine", "$id": "x", "$anchor": "y", "type": "null"}, "null", "1"),
        (
            {"type": "array", "items": [{"type": "null"}], "additionalItems": False, "minItems": 1},
            "[null]",
            "[1",
        ),
        (fields(a={"const": {"$ref": "#/zz"}}), '{"a": {"$ref": "#/zz"}}', '{"a": 1'),
        ({"enum": [{"format": "path"}], "default": {"$ref": "#/zz"}}, '{"format": "path"}', "1"),
        ({"not": False, "type": "null", "dependentRequired": {}, "if": {"type": "null"}}, "null", "1"),
        (
            {"type": "object", "properties": {"a": TEXT}, "unevaluatedProperties": False},
            '{"a": ""}',
            '{"b',
        ),
        (
            {
                "$ref": "other#here",
                "$defs": {"o": {"$id": "other", "$defs": {"é %": {"$anchor": "here", "type": "null"}}}},
            },
            "null",
            "1",
        ),
        ({"$ref": "#/components/x%20y", "components": {"x y": {"type": "null", "format": "z"}}}, "null", "1"),
        (
            {
                "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, {"type": "null"}],
                "$defs": {
                    "cat": fields(kind={"const": "cat", "type": "string"}, lives={"type": "integer"}),
                    "dog": fields(kind={"enum": ["dog", "hound"]}, lives=TEXT),
                },
            },
            '{"kind": "hound", "lives": "one"}',
            '{"kind": "cat", "lives": "n',
        ),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_says_nothing_or_can_be_said_is_taken(compiler, tokenizer, value, good, bad):
    assert takes(compiler, tokenizer, schema(value), good)
    matcher = compiler.matcher(schema(value))
    assert not all(matcher.accept(token_id) for token_id in tokenizer.encode(bad))


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"oneOf": [fields(a=TEXT), fields(a=TEXT)]}, "use anyOf"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "use anyOf"),
        ({"$ref": "https://example.com/schema"}, "are not fetched"),
        ({"$ref": "#nowhere"}, "names nothing in the schema"),
        ({"type": "array", "uniqueItems": True, "items": TEXT}, "uniqueItems"),
        ({"type": "object", "properties": {f"p{i}": TEXT for i in range(4000)}}, "fewer optional properties"),
    ],
)
def test_a_refusal_says_what_to_do_in_words_of_the_schema(compiler, value, complaint):
    with pytest.raises(RequestError, match=complaint) as refused:
        compiler.validate(schema(value))
    assert "coerce" not in refused.value.message
    assert "<state>" not in refused.value.message


def test_a_spec_that_is_too_long_is_refused_before_it_is_compiled(compiler):
    with pytest.raises(RequestError, match=r"has 300,000 characters; at most 65,536 are possible"):
        compiler.validate(StructuredSpec("regex", "a" * 300_000))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (schema(fields(s={"type": "string", "pattern": r"^(\w{1,30} ?){20,60}$"})), '{"s": "'),
        (
            schema(
                fields(
                    s={"type": "string", "allOf": [{"pattern": r"[a-z]{3}.{0,300}[.,]"}, {"pattern": "a"}]}
                )
            ),
            '{"s": "',
        ),
        (StructuredSpec("regex", r"([A-Za-z0-9,.]+ ?){1,800}"), ""),
    ],
    ids=["summary", "all of", "words"],
)
def test_large_patterns_last_for_a_whole_answer(compiler, tokenizer, spec, text):
    text += "the cat sat on the mat and saw a dog " * 3
    for _ in range(2):
        follow(compiler, spec, tokenizer.encode(text))


def test_a_pattern_at_the_limit_is_followed_or_refused_each_time(compiler, tokenizer):
    """How far the trial at admission gets depends on the machine's speed."""
    spec, text = StructuredSpec("regex", r"(\w{1,300} ?){1,300}"), "the cat sat on the mat " * 4
    for _ in range(2):
        try:
            follow(compiler, spec, tokenizer.encode(text))
        except RequestError as error:
            assert "it is too complex" in error.message  # noqa: PT017


def test_700_optional_properties_are_followed(compiler, tokenizer):
    spec = schema({"type": "object", "properties": {f"p{i}": TEXT for i in range(700)}})
    follow(compiler, spec, tokenizer.encode('{"p0": "x", "p3": "y", "p699": "z"}'))


def test_a_matcher_that_gives_up_says_so_and_allows_nothing(compiler, tokenizer):
    """Limits that are met only further on: this one is cut by hand."""
    matcher = compiler.matcher(StructuredSpec("regex", "abc"))
    matcher._matcher.consume_token(tokenizer.encode("x")[0])
    assert matcher.error
    assert not matcher.finished
    assert allowed(matcher, compiler.mask_words) == []
    assert not matcher.accept(EOS)
    assert follow(compiler, StructuredSpec("regex", "abc"), tokenizer.encode("abc")).finished


def test_a_text_that_looks_like_a_schema_of_a_grammar_is_a_text(compiler, tokenizer):
    matcher = compiler.matcher(StructuredSpec("lark", r'start: "%json{}"'))
    assert all(matcher.accept(token_id) for token_id in tokenizer.encode("%json{}"))
    assert matcher.finished
