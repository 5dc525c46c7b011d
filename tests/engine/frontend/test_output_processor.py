"""The core's token ids become text, finish reasons and choices (rows E1, E2, E5, E18, frontend side)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.engine.errors import RequestError
from leadline.engine.frontend.collector import OutputCollector
from leadline.engine.frontend.output_processor import OutputProcessor
from leadline.engine.messages import CoreOutput, CoreRequest, TokenLogprobs
from leadline.engine.outputs import OutputDelta
from leadline.engine.sampling_params import SamplingParams

EOS = 2


def request(
    prompt: list[int], request_id: str = "r", seed: int = 7, num_resumed: int = 0, **sampling
) -> CoreRequest:
    return CoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{"max_tokens": 100, **sampling}),
        seed=seed,
        arrival=0.0,
        eos_token_ids=(EOS,),
        num_resumed=num_resumed,
    )


def feed(processor: OutputProcessor, outputs: list[CoreOutput]) -> tuple[list[OutputDelta], list[str]]:
    deltas, aborts = [], []
    for output in outputs:
        new, gone = processor.process(output)
        deltas += new
        aborts += gone
    return deltas, aborts


def one_by_one(ids: list[int], finish: str | None = "length", request_id: str = "r") -> list[CoreOutput]:
    outputs = [CoreOutput(request_id=request_id, new_token_ids=[i]) for i in ids]
    outputs[-1].finish_reason = finish
    if finish == "stop":
        outputs[-1].stop_token_id = ids[-1]
    return outputs


def text_of(deltas: list[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_text_streams_token_by_token_and_ends_with_the_cores_reason(tokenizer):
    processor = OutputProcessor(tokenizer)
    sent = processor.add(request(tokenizer.encode("Say")))
    ids = tokenizer.encode("The capital of France is Paris.")
    deltas, aborts = feed(processor, one_by_one(ids))
    assert [r.request_id for r in sent] == ["r"]
    assert text_of(deltas) == "The capital of France is Paris."
    assert [i for d in deltas for i in d.token_ids] == ids
    assert [d.finish_reason for d in deltas] == [None] * (len(ids) - 1) + ["length"]
    assert [d.num_output_tokens for d in deltas] == list(range(1, len(ids) + 1))
    assert (aborts, len(processor)) == ([], 0)


def test_eos_is_reported_as_a_token_but_is_no_text_and_no_stop_reason(tokenizer):
    for skip in (True, False):
        processor = OutputProcessor(tokenizer)
        processor.add(request([5], skip_special_tokens=skip))
        ids = [*tokenizer.encode("Paris"), EOS]
        deltas, _ = feed(processor, one_by_one(ids, "stop"))
        assert text_of(deltas) == "Paris"
        assert deltas[-1].token_ids == [EOS]
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)


def test_a_stop_token_of_the_callers_is_named_as_the_reason(tokenizer):
    processor = OutputProcessor(tokenizer)
    ids = tokenizer.encode("Paris!")
    processor.add(request([5], stop_token_ids=(ids[-1],)))
    deltas, _ = feed(processor, one_by_one(ids, "stop"))
    assert text_of(deltas) == tokenizer.decode(ids[:-1])
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", ids[-1])


def test_a_stop_token_is_text_where_stop_strings_are(tokenizer):
    """With include_stop_str_in_output, as for stop strings; what is special still goes by its own switch."""
    ids = tokenizer.encode("Paris!")
    for stop, skip, text in (
        (ids[-1], True, "Paris!"),
        (EOS, True, "Paris!"),
        (EOS, False, "Paris!<|im_end|>"),
    ):
        processor = OutputProcessor(tokenizer)
        params = {"stop_token_ids": (stop,), "include_stop_str_in_output": True, "skip_special_tokens": skip}
        processor.add(request([5], **params))
        deltas, _ = feed(processor, one_by_one(ids if stop != EOS else [*ids, EOS], "stop"))
        assert text_of(deltas) == text


def test_a_stop_string_ends_the_choice_and_aborts_it_in_the_core(tokenizer):
    processor = OutputProcessor(tokenizer)
    processor.add(request([5], stop=("DEFGHIJ",)))
    ids = tokenizer.encode("A B C DEFGHIJ K L M")
    deltas, aborts = feed(processor, one_by_one(ids))
    assert text_of(deltas) == "A B C "
    assert aborts == ["r"]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "DEFGHIJ")
    reported = [i for d in deltas for i in d.token_ids]
    assert "DEFGHIJ" in tokenizer.decode(reported)
    assert "DEFGHIJ" not in tokenizer.decode(reported[:-1])
    assert len(processor) == 0


def test_a_stop_string_in_the_last_token_needs_no_abort(tokenizer):
    processor = OutputProcessor(tokenizer)
    processor.add(request([5], stop=(".",)))
    deltas, aborts = feed(processor, one_by_one(tokenizer.encode("Yes.")))
    assert (text_of(deltas), aborts, deltas[-1].finish_reason) == ("Yes", [], "stop")


@given(
    words=st.lists(
        st.sampled_from(["alpha", " beta", "\n", "ab", "😀", " the", "東京"]), min_size=1, max_size=12
    ),
    stops=st.lists(st.sampled_from(["a b", "ta\n", "😀", "bab", "the", "京", "zzz"]), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 8),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_however_the_core_batches_its_tokens_the_outcome_is_the_same(
    tokenizer, words, stops, include, min_tokens, sizes
):
    ids = tokenizer.encode("".join(words))

    def outcome(sizes: list[int]) -> tuple:
        processor = OutputProcessor(tokenizer)
        sampling = {"stop": tuple(stops), "include_stop_str_in_output": include, "min_tokens": min_tokens}
        processor.add(request([5], **sampling))
        outputs, at, turn = [], 0, 0
        while at < len(ids):
            size = sizes[turn % len(sizes)]
            logprobs = [TokenLogprobs(i, -1.0, 1) for i in ids[at : at + size]]
            outputs.append(CoreOutput(request_id="r", new_token_ids=ids[at : at + size], logprobs=logprobs))
            at, turn = at + size, turn + 1
        outputs[-1].finish_reason = "length"
        deltas, _ = feed(processor, outputs)
        tokens = [i for d in deltas for i in d.token_ids]
        assert [entry.token_id for d in deltas for entry in d.logprobs] == tokens
        assert deltas[-1].num_output_tokens == len(tokens)
        return text_of(deltas), tokens, deltas[-1].finish_reason, deltas[-1].stop_reason

    alone = outcome([1])
    assert outcome(sizes) == alone
    text, tokens, finish, stop = alone
    whole = tokenizer.decode(ids)
    if stop is None:
        assert (text, tokens, finish) == (whole, ids, "length")
        assert min_tokens or not any(s in whole for s in stops)
    else:
        assert whole.startswith(text)
        assert text.endswith(stop) if include else whole[len(text) :].startswith(stop)
        assert len(tokens) >= min_tokens


def test_max_tokens_in_the_middle_of_a_character_flushes_one_replacement_character(tokenizer):
    processor = OutputProcessor(tokenizer)
    processor.add(request([5]))
    deltas, _ = feed(processor, one_by_one(tokenizer.encode("ok 🜚")[:-1]))
    assert text_of(deltas) == "ok \ufffd"
    assert not any("\ufffd" in delta.text for delta in deltas[:-1])


def test_n_choices_have_their_own_seeds_and_indexes(tokenizer):
    processor = OutputProcessor(tokenizer)
    children = processor.add(request([5, 6], n=3, prompt_logprobs=1, seed=2**63 - 1))
    assert len({child.request_id for child in children}) == 3
    assert [child.seed for child in children] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert [child.sampling.n for child in children] == [1, 1, 1]
    assert [child.sampling.prompt_logprobs for child in children] == [1, None, None]
    collector = OutputCollector("r", None, [5, 6], n=3)
    for i, child in enumerate(children):
        ids = tokenizer.encode(f"answer {i}")
        for delta in feed(processor, one_by_one(ids, request_id=child.request_id))[0]:
            assert (delta.request_id, delta.index) == ("r", i)
            collector.add(delta)
        assert ("r" in processor) == (i < 2)
    assert collector.done
    assert [choice.text for choice in collector.result().outputs] == ["answer 0", "answer 1", "answer 2"]


def test_requests_survive_the_wire(tokenizer):
    (child,) = OutputProcessor(tokenizer).add(request([5], seed=-(2**63)))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(child), type=CoreRequest)
    assert again == child


def test_an_aborted_request_gives_its_children_to_abort_and_says_nothing_more(tokenizer):
    processor = OutputProcessor(tokenizer)
    children = processor.add(request([5], n=2))
    assert processor.abort("r") == [child.request_id for child in children]
    assert processor.process(CoreOutput(request_id=children[0].request_id, new_token_ids=[9])) == ([], [])
    assert processor.abort("r") == []
    assert len(processor) == 0


def test_two_requests_in_flight_must_not_share_an_id(tokenizer):
    processor = OutputProcessor(tokenizer)
    processor.add(request([5]))
    with pytest.raises(RequestError, match="already in flight"):
        processor.add(request([5]))
    feed(processor, one_by_one([9]))
    processor.add(request([5]))


def test_a_resumed_request_only_gives_text_that_was_not_given_before(tokenizer):
    ids = tokenizer.encode("one two three DEF four 🜚 five")
    full = tokenizer.decode(ids)
    for cut in range(1, len(ids)):
        first, second = OutputProcessor(tokenizer), OutputProcessor(tokenizer)
        first.add(request([5], stop=("DEFGH",)))
        before, _ = feed(first, [CoreOutput(request_id="r", new_token_ids=[i]) for i in ids[:cut]])
        second.add(request([5, *ids[:cut]], stop=("DEFGH",), num_resumed=cut))
        after, _ = feed(second, one_by_one(ids[cut:]))
        assert text_of(before) + text_of(after) == full
        assert after[-1].num_prompt_tokens == 1
        assert after[-1].num_output_tokens == len(ids)


@given(
    words=st.lists(
        st.sampled_from(["alpha", " beta", "\n", "ab", "😀", " the", "東京"]), min_size=1, max_size=6
    ),
    end=st.sampled_from(["eos", "stop id", "cut"]),
    stops=st.lists(st.sampled_from(["a b", "ta\n", "😀", "bab", "the", "京", "zzz"]), max_size=3),
    include=st.booleans(),
    shown=st.booleans(),
    min_tokens=st.integers(0, 8),
)
@settings(max_examples=200, deadline=None)
def test_a_resumed_request_ends_where_the_earlier_attempt_would_have_ended(
    tokenizer, words, end, stops, include, shown, min_tokens
):
    """Wherever that attempt was cut off, behind its last token too, what is left is what it lacked."""
    ids = tokenizer.encode("".join(words))
    sampling = {"stop": tuple(stops), "include_stop_str_in_output": include, "min_tokens": min_tokens}
    sampling["skip_special_tokens"] = not shown
    match end:
        case "eos":
            ids.append(EOS)
            outputs = one_by_one(ids, "stop" if len(ids) > min_tokens else "length")
        case "stop id":
            sampling["stop_token_ids"] = (ids[-1],)
            first = next((n for n, i in enumerate(ids, 1) if i == ids[-1] and n > min_tokens), None)
            ids = ids[:first]
            outputs = one_by_one(ids, "stop" if first else "length")
        case _:
            outputs = one_by_one(ids)
    sampling["max_tokens"] = len(ids)
    processor = OutputProcessor(tokenizer)
    processor.add(request([5], **sampling))
    whole, _ = feed(processor, outputs)
    for cut in range(1, len(whole) + 1):
        processor = OutputProcessor(tokenizer)
        resumed = request([5, *ids[:cut]], num_resumed=cut, **sampling)
        sent = processor.add(resumed)
        earlier = processor.take_resumed(resumed)
        assert earlier.resumed
        assert earlier.text == text_of(whole[:cut])
        assert earlier.token_ids == ids[:cut]
        assert (sent == []) == (earlier.finish_reason is not None) == (cut == len(whole))
        rest, _ = feed(processor, outputs[cut:]) if sent else ([], [])
        last = [earlier, *rest][-1]
        assert text_of([earlier, *rest]) == text_of(whole)
        assert (last.finish_reason, last.stop_reason) == (whole[-1].finish_reason, whole[-1].stop_reason)
        assert (last.num_prompt_tokens, last.num_output_tokens) == (1, len(whole))
        assert len(processor) == 0


def test_a_resumed_request_that_is_over_still_has_its_prompt_scored(tokenizer):
    """The log probabilities of the prompt come with the end of an answer."""
    processor = OutputProcessor(tokenizer)
    resumed = request([5, 6, 7, *(ids := [9, EOS])], num_resumed=2, prompt_logprobs=1, stop=("x",))
    (scored,) = processor.add(resumed)
    assert (scored.prompt_token_ids, scored.num_resumed, scored.sampling.max_tokens) == ([5, 6, 7], 0, 1)
    assert processor.take_resumed(resumed) is None
    rows = [TokenLogprobs(i, -1.0, 1) for i in (6, 7)]
    output = CoreOutput(request_id="r", new_token_ids=[8], prompt_logprobs=rows, finish_reason="length")
    (delta,), aborts = processor.process(output)
    assert (delta.finish_reason, delta.token_ids, delta.prompt_logprobs, aborts) == ("stop", ids, rows, [])
    assert delta.resumed
    assert len(processor) == 0


def test_the_resumed_output_is_not_scored_and_not_counted_as_cached(tokenizer):
    processor = OutputProcessor(tokenizer)
    processor.add(request([5, 6, 7, 8], num_resumed=2, prompt_logprobs=0))
    rows = [TokenLogprobs(i, -1.0, 1) for i in (6, 7, 8)]
    output = CoreOutput(request_id="r", new_token_ids=[9], prompt_logprobs=rows, num_cached_tokens=3)
    ((delta,), _) = processor.process(output)
    assert (delta.prompt_logprobs, delta.num_prompt_tokens, delta.num_cached_tokens) == (rows[:1], 2, 2)


def test_a_stop_string_that_began_before_the_resumption_is_found(tokenizer):
    ids = tokenizer.encode("say DEFGHIJ now")
    cut = len(ids) // 2
    processor = OutputProcessor(tokenizer)
    processor.add(request([5, *ids[:cut]], stop=("DEFGHIJ",), num_resumed=cut))
    deltas, aborts = feed(processor, one_by_one(ids[cut:]))
    assert (deltas[-1].stop_reason, aborts) == ("DEFGHIJ", ["r"])


def test_counts_and_errors_of_the_core_are_passed_on(tokenizer):
    processor = OutputProcessor(tokenizer)
    processor.add(request([5, 6, 7]))
    first = CoreOutput(request_id="r", new_token_ids=[9], num_cached_tokens=2, queue_seconds=0.5)
    last = CoreOutput(request_id="r", finish_reason="deadline", error="too late")
    deltas, _ = feed(processor, [first, last])
    assert [(d.num_prompt_tokens, d.num_cached_tokens, d.queue_seconds) for d in deltas] == [(3, 2, 0.5)] * 2
    assert (deltas[-1].finish_reason, deltas[-1].error) == ("deadline", "too late")


def test_when_the_core_dies_every_choice_in_flight_ends_with_an_error(tokenizer):
    processor = OutputProcessor(tokenizer)
    processor.add(request([5], "a"))
    processor.add(request([5], "b", n=2))
    deltas = processor.fail_all("the core stopped")
    assert sorted((d.request_id, d.index, d.finish_reason) for d in deltas) == [
        ("a", 0, "error"),
        ("b", 0, "error"),
        ("b", 1, "error"),
    ]
    assert len(processor) == 0


def test_the_collector_adds_up_one_request(tokenizer):
    collector = OutputCollector("r", "hi", [1, 2])
    one, two = TokenLogprobs(5, -0.1, 1), TokenLogprobs(6, -0.2, 1)
    collector.add(
        OutputDelta("r", 0, "a", [5], [one], prompt_logprobs=[two], num_cached_tokens=1, queue_seconds=0.25)
    )
    assert not collector.done
    assert collector.add(
        OutputDelta("r", 0, "b", [6], [two], finish_reason="stop", stop_reason="x", num_cached_tokens=1)
    )
    result = collector.result()
    assert (result.prompt, result.prompt_token_ids, result.prompt_logprobs) == ("hi", [1, 2], [two])
    assert (result.num_cached_tokens, result.queue_seconds) == (1, 0.25)
    assert 0 < result.first_token_seconds <= result.total_seconds
    (choice,) = result.outputs
    assert (choice.text, choice.token_ids, choice.logprobs) == ("ab", [5, 6], [one, two])
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "x")
