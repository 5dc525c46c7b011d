"""What is refused before it reaches the core, and what is filled in (rows E3, E4, E5, E15, E16, E18, E21)."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.engine.config import EngineConfig
from leadline.engine.errors import RequestError
from leadline.engine.frontend.validation import RequestBuilder
from leadline.engine.models.config import GenerationDefaults, load_model_config
from leadline.engine.sampling_params import SamplingParams, StructuredSpec

VOCAB = 49152
LIMIT = 64


@dataclass
class Facts:
    """The part of ModelConfig that validation reads."""

    vocab_size: int = VOCAB
    eos_token_ids: tuple[int, ...] = (2, 0)
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)


def builder_for(tokenizer, *, limit=LIMIT, pool=1 << 20, generation=None, **config) -> RequestBuilder:
    facts = Facts(generation=generation or GenerationDefaults())
    return RequestBuilder(EngineConfig(model="smollm2", **config), facts, tokenizer, limit, pool)


@pytest.fixture(scope="module")
def builder(tokenizer) -> RequestBuilder:
    return builder_for(tokenizer)


def refused(
    builder: RequestBuilder, prompt, sampling: SamplingParams | None = None, **options
) -> RequestError:
    with pytest.raises(RequestError) as caught:
        builder.build(prompt, sampling or SamplingParams(), **options)
    assert caught.value.status == 400
    return caught.value


def test_a_good_request_is_complete_when_it_leaves(builder, tokenizer):
    request = builder.build("What is the capital of France?", SamplingParams(seed=5))
    assert request.prompt_token_ids == tokenizer.encode("What is the capital of France?")
    assert request.sampling.max_tokens == LIMIT - len(request.prompt_token_ids)
    assert (request.seed, request.eos_token_ids, request.priority_class) == (5, (2, 0), "interactive")
    assert request.request_id


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(builder, prompt):
    assert refused(builder, prompt).param == "prompt"


def test_a_prompt_one_below_the_limit_has_room_for_one_token(builder):
    assert builder.build([5] * (LIMIT - 1), SamplingParams()).sampling.max_tokens == 1
    assert builder.build([5] * (LIMIT - 1), SamplingParams(max_tokens=9)).sampling.max_tokens == 1


@pytest.mark.parametrize("length", [LIMIT, LIMIT + 1, 10 * LIMIT])
def test_a_prompt_at_or_above_the_limit_is_refused_naming_both_numbers(builder, length):
    error = refused(builder, [5] * length)
    assert str(length) in error.message
    assert str(LIMIT) in error.message
    assert error.code == "context_length_exceeded"


def test_a_text_that_is_too_long_is_refused_like_its_tokens(builder, tokenizer):
    text = "hello " * 100
    error = refused(builder, text)
    assert str(len(tokenizer.encode(text))) in error.message


def test_megabytes_of_text_are_refused_without_tokenizing_them(builder, monkeypatch):
    monkeypatch.setattr(type(builder._tokenizer), "encode", lambda *_: pytest.fail("tokenized"))
    assert "at least" in refused(builder, "x" * 10_000_000).message


@given(st.text("ab \n€", max_size=400))
@settings(max_examples=100, deadline=None)
def test_the_quick_refusal_never_refuses_what_would_fit(builder, tokenizer, text):
    if 0 < len(tokenizer.encode(text)) < LIMIT:
        assert builder.build(text, SamplingParams()).prompt_token_ids == tokenizer.encode(text)


def test_a_prompt_that_the_whole_pool_cannot_hold_is_refused_naming_the_pool(tokenizer):
    small = builder_for(tokenizer, limit=1000, pool=128)
    error = refused(small, [5] * 128)
    assert "KV pool" in error.message
    assert "128" in error.message
    # What is admitted can never outgrow the pool.
    assert small.build([5] * 100, SamplingParams(max_tokens=500)).sampling.max_tokens == 28


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_max_tokens_below_one_is_refused(builder, max_tokens):
    assert refused(builder, [5], SamplingParams(max_tokens=max_tokens)).param == "max_tokens"


def test_absent_max_tokens_means_all_the_room_there_is(builder):
    assert builder.build([5] * 10, SamplingParams()).sampling.max_tokens == LIMIT - 10


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**40, True, "5", 1.5])
def test_prompt_ids_beyond_the_vocabulary_are_named(builder, token_id):
    error = refused(builder, [5, token_id])
    assert error.message.startswith("prompt[1]")
    assert str(VOCAB - 1) in error.message


def test_a_text_that_makes_tokens_the_model_lacks_is_refused(tokenizer):
    """A tokenizer with a [PAD] that the embedding has no row for: its text would fail the whole step."""
    smaller = RequestBuilder(
        EngineConfig(model="smollm2"),
        Facts(vocab_size=40_000, eos_token_ids=(2, 99)),
        tokenizer,
        LIMIT,
        1 << 20,
    )
    (word,) = tokenizer.encode(" biopsies")
    assert word > 40_000
    error = refused(smaller, "Hello biopsies")
    assert error.param == "prompt"
    assert f"' biopsies', which the tokenizer makes token {word}" in error.message
    assert smaller.build("Hello", SamplingParams()).prompt_token_ids == tokenizer.encode("Hello")


def test_end_tokens_that_the_model_lacks_are_left_out(tokenizer):
    facts = Facts(eos_token_ids=(VOCAB, 0, -1))
    builder = RequestBuilder(EngineConfig(model="smollm2"), facts, tokenizer, LIMIT, 1 << 20)
    assert builder.build("Hello", SamplingParams(min_tokens=2)).eos_token_ids == (0, tokenizer.eos_token_id)
    assert builder.build("Hello", SamplingParams(structured=StructuredSpec("regex", "a"))).eos_token_ids


def test_numpy_ids_are_taken(builder):
    request = builder.build(list(np.arange(5)), SamplingParams())
    assert request.prompt_token_ids == [0, 1, 2, 3, 4]
    assert {type(token_id) for token_id in request.prompt_token_ids} == {int}


@pytest.mark.parametrize("token_id", [VOCAB, VOCAB + 1000, 2**62])
def test_logit_bias_and_stop_token_ids_beyond_the_vocabulary_are_refused(builder, token_id):
    for param, value in (("logit_bias", {token_id: 1.0}), ("stop_token_ids", (token_id,))):
        error = refused(builder, [5], SamplingParams(**{param: value}))
        assert (error.param, str(token_id) in error.message) == (param, True)
    assert refused(builder, [5], SamplingParams(stop_token_ids=(-1,))).param == "stop_token_ids"
    builder.build([5], SamplingParams(logit_bias={VOCAB - 1: 1.0}, stop_token_ids=(VOCAB - 1,)))


def test_n_above_the_cap_is_refused_naming_the_cap(tokenizer):
    capped = builder_for(tokenizer, max_n=4)
    assert capped.build([5], SamplingParams(n=4)).sampling.n == 4
    for n in (5, 512):
        error = refused(capped, [5], SamplingParams(n=n))
        assert (error.param, "at most 4" in error.message) == ("n", True)


@pytest.mark.parametrize("param", ["logprobs", "prompt_logprobs"])
def test_logprobs_above_the_cap_are_refused(builder, param):
    builder.build([5], SamplingParams(**{param: 20}))
    assert refused(builder, [5], SamplingParams(**{param: 21})).param == param


def test_a_thousand_stop_strings_are_refused(builder):
    assert refused(builder, [5], SamplingParams(stop=tuple(map(str, range(1000))))).param == "stop"
    assert refused(builder, [5], SamplingParams(stop=("",))).param == "stop"


@pytest.mark.parametrize(
    "spec",
    [
        StructuredSpec("regex", "[a-"),
        StructuredSpec("regex", "(?=x)y"),
        StructuredSpec("json_schema", '{"type": "objekt"}'),
        StructuredSpec("json_schema", "not json"),
        StructuredSpec("json_schema", '{"not": {}}'),
        StructuredSpec("lark", "start: missing"),
        StructuredSpec("regex", "\ud800"),
    ],
)
def test_a_grammar_that_does_not_compile_is_refused_and_the_next_good_one_passes(builder, spec):
    error = refused(builder, [5], SamplingParams(structured=spec))
    assert error.code == "invalid_grammar"
    assert "<state>" not in error.message
    good = StructuredSpec("json_schema", '{"type": "object"}')
    assert builder.build([5], SamplingParams(structured=good)).sampling.structured == good


def test_min_tokens_is_checked_against_the_room_and_against_grammars(builder):
    assert refused(builder, [5] * 60, SamplingParams(min_tokens=5)).param == "min_tokens"
    builder.build([5] * 60, SamplingParams(min_tokens=4))
    constrained = SamplingParams(min_tokens=1, structured=StructuredSpec("json_object"))
    assert refused(builder, [5], constrained).param == "min_tokens"


def test_ignore_eos_leaves_no_eos_ids_unless_a_grammar_needs_them(builder):
    assert builder.build([5], SamplingParams(ignore_eos=True)).eos_token_ids == ()
    constrained = SamplingParams(ignore_eos=True, structured=StructuredSpec("json_object"))
    assert builder.build([5], constrained).eos_token_ids == (2, 0)


def test_requests_without_a_seed_get_different_ones(builder):
    seeds = {builder.build([5], SamplingParams()).seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_engines_queue_timeout_holds_unless_the_request_has_its_own(tokenizer):
    patient = builder_for(tokenizer, queue_timeout=30.0)
    assert patient.build([5], SamplingParams()).queue_timeout == 30.0
    assert patient.build([5], SamplingParams(), queue_timeout=1.0).queue_timeout == 1.0
    assert patient.build([5], SamplingParams(), queue_timeout=0.0).queue_timeout == 0.0
    for bad in (-1.0, float("nan")):
        assert refused(patient, [5], queue_timeout=bad).param == "queue_timeout"


def test_an_unknown_priority_class_is_refused(builder):
    assert builder.build([5], SamplingParams(), priority_class="batch").priority_class == "batch"
    assert "interactive, batch" in refused(builder, [5], priority_class="urgent").message


def test_a_resumed_request_counts_its_earlier_output(builder):
    request = builder.build([5] * 20, SamplingParams(max_tokens=12), num_resumed=10)
    assert (request.sampling.max_tokens, request.num_resumed) == (12, 10)
    assert builder.build([5] * 20, SamplingParams(), num_resumed=10).sampling.max_tokens == LIMIT - 10
    assert builder.build([5] * 20, SamplingParams(max_tokens=10), num_resumed=10).num_resumed == 10
    beyond = refused(builder, [5] * 20, SamplingParams(max_tokens=9), num_resumed=10)
    assert beyond.param == "resume_token_ids"
    whole = builder.build([5] * LIMIT, SamplingParams(), num_resumed=10)
    assert whole.sampling.max_tokens == 10
    assert refused(builder, [5] * (LIMIT + 1), num_resumed=1).code == "context_length_exceeded"
    assert refused(builder, [5], num_resumed=1).param == "resume_token_ids"
    assert refused(builder, [5, 6], SamplingParams(n=2), num_resumed=1).param == "n"


def test_the_models_recommendations_fill_in_what_the_caller_left_open(tokenizer):
    recommended = GenerationDefaults(
        temperature=0.2, top_k=20, top_p=0.9, repetition_penalty=1.1, max_new_tokens=7
    )
    builder = builder_for(tokenizer, generation=recommended)
    params = builder.sampling_params({"temperature": None, "top_p": 0.5})
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.2, 20, 0.5, 1.1)
    assert builder.build([5], params).sampling.max_tokens == 7
    assert builder.build([5], builder.sampling_params({"max_tokens": 9})).sampling.max_tokens == 9


def test_a_model_recommended_for_greedy_is_greedy_unless_asked_otherwise(tokenizer):
    builder = builder_for(tokenizer, generation=GenerationDefaults(do_sample=False, top_k=-1))
    assert builder.sampling_params({}).greedy
    assert builder.sampling_params({}).top_k == 0
    assert builder.sampling_params({"temperature": 0.7}).temperature == 0.7


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("top_p", 1.5, "top_p"),
        ("temperature", 5.0, "temperature"),
        ("top_k", "many", "top_k"),
        ("max_new_tokens", -1, "max_tokens"),
    ],
)
def test_a_recommendation_that_no_request_may_have_is_ignored(tokenizer, caplog, field, value, name):
    """It would have failed every request that leaves the parameter open."""
    builder = builder_for(tokenizer, generation=GenerationDefaults(**{"min_p": 0.1, field: value}))
    params = builder.sampling_params({})
    assert params == SamplingParams(min_p=0.1)
    assert builder.build([5], params).sampling.max_tokens == LIMIT - 1
    assert f"generation_config.json: {name}" in caplog.text


def test_a_top_k_of_any_size_is_understood_and_fits_the_message_to_the_core(builder):
    assert builder.sampling_params({"top_k": 10**21}).top_k == (1 << 31) - 1
    msgspec.msgpack.encode(builder.build([5], SamplingParams(top_k=10**21, max_tokens=10**21)).sampling)


def test_a_top_k_of_minus_one_is_off_as_elsewhere(builder):
    assert builder.sampling_params({"top_k": -1}).top_k == 0
    assert builder.build([5], SamplingParams(top_k=-1)).sampling.top_k == 0
    assert refused(builder, [5], SamplingParams(top_k=-2)).param == "top_k"


def test_json_forms_of_parameters_are_understood(builder):
    params = builder.sampling_params(
        {"stop": "END", "logit_bias": {"5": 2, 6: -1.5}, "seed": 3, "temperature": 1}
    )
    assert params.stop == ("END",)
    assert params.logit_bias == {5: 2.0, 6: -1.5}
    assert builder.sampling_params({"stop": ["a", "b"]}).stop == ("a", "b")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"temprature": 1.0}, "temprature"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": [1]}, "stop"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_wrong_names_and_types_are_named(builder, given, param):
    with pytest.raises(RequestError) as caught:
        builder.sampling_params(given)
    assert caught.value.param == param


def test_parameters_built_by_hand_are_understood_as_well(builder):
    """One stop string is not a list of its characters."""
    params = SamplingParams(
        stop="END",
        logit_bias={"5": 2},
        stop_token_ids=[7],
        temperature=np.float32(0.5),
        max_tokens=np.int64(3),
    )
    sampling = builder.build([5], params).sampling
    assert sampling == SamplingParams(
        stop=("END",), logit_bias={5: 2.0}, stop_token_ids=(7,), temperature=0.5, max_tokens=3
    )
    assert type(sampling.max_tokens) is int
    unset = SamplingParams(stop=None, stop_token_ids=None, temperature=None, n=None, max_tokens=4)
    assert builder.build([5], unset).sampling == SamplingParams(max_tokens=4)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"stop": 5}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"temperature": "0.7"}, "temperature"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"logit_bias": {5: "a"}}, "logit_bias"),
        ({"structured": "[0-9]+"}, "structured"),
    ],
)
def test_wrong_types_of_parameters_built_by_hand_are_named(builder, given, param):
    assert refused(builder, [5], SamplingParams(**given)).param == param


@pytest.mark.parametrize("prompt", [b"abc", {"prompt_token_ids": [5]}, None, 5.0])
def test_what_is_neither_text_nor_token_ids_is_refused_by_its_type(builder, prompt):
    assert type(prompt).__name__ in refused(builder, prompt).message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, 2.1])
def test_ranges_are_checked(builder, value):
    assert refused(builder, [5], SamplingParams(temperature=value)).param == "temperature"


def test_the_real_model_config_has_what_validation_reads(smollm_folder, tokenizer):
    config = load_model_config(smollm_folder)
    assert config.vocab_size == VOCAB
    builder = RequestBuilder(EngineConfig(model="smollm2"), config, tokenizer, config.max_model_len, 1 << 20)
    request = builder.build("Hi", builder.sampling_params({}))
    assert 2 in request.eos_token_ids
    assert request.sampling.max_tokens == config.max_model_len - len(request.prompt_token_ids)


def test_bad_words_become_the_tokens_of_both_forms(builder, tokenizer):
    request = builder.build("Hi", SamplingParams(bad_words=(" Paris", (7, 8), "Paris")))
    bare, spaced = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("Paris", " Paris"))
    expected = [bare, (7, 8)]
    if len(spaced) == len(bare) and spaced[0] != bare[0]:
        expected.insert(1, spaced)
    assert request.sampling.bad_words == tuple(expected)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"allowed_token_ids": (VOCAB,)}, "allowed_token_ids"),
        ({"bad_words": ((1, VOCAB),)}, "bad_words"),
        ({"bad_words": ((1,) * 65,)}, "bad_words"),
        ({"bad_words": ("   ",)}, "bad_words"),
        ({"allowed_token_ids": (5, 6), "bad_words": ((5,), (7, 6))}, "allowed_token_ids"),
        ({"allowed_token_ids": (2,), "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": (5,), "structured": StructuredSpec("regex", "a")}, "allowed_token_ids"),
        ({"bad_words": ("a",), "structured": StructuredSpec("regex", "a")}, "bad_words"),
    ],
)
def test_what_leaves_nothing_to_sample_or_cannot_hold_is_refused(builder, given, named):
    assert refused(builder, "Hi", SamplingParams(**given)).param == named


def test_a_bad_word_far_too_long_is_refused_without_tokenizing_it(builder, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "encode", None)
    error = refused(builder, [1], SamplingParams(bad_words=("word " * 100_000,)))
    assert error.message == "bad_words: each word must have 1 to 64 tokens, got more than 64"


def test_a_token_named_many_times_is_carried_once(builder):
    given = SamplingParams(allowed_token_ids=(7, 5) * 1000, stop_token_ids=(9,) * 1000)
    sampling = builder.build([1], given).sampling
    assert (sampling.allowed_token_ids, sampling.stop_token_ids) == ((7, 5), (9,))
