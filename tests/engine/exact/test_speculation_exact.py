"""Speculation by prompt lookup on the real model: the same tokens as without it, and fewer steps for them."""

from __future__ import annotations

import pytest
from exact_prompts import NEW_TOKENS

from leadline.engine.frontend.output_processor import OutputProcessor
from leadline.engine.sampling_params import SamplingParams, StructuredSpec

pytestmark = pytest.mark.timeout(900)

GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
LONGER = SamplingParams(temperature=0, max_tokens=32)
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
ON = {"speculative_ngram": 4, "speculative_match": 2, "speculative_max_batch": 64}


@pytest.fixture(scope="module")
def copying(tokenizer) -> list[list[int]]:
    """Prompts whose answers repeat: lists, code, a sentence begun again."""
    texts = [
        "red, green, blue, red, green, blue, red, green, blue, red,",
        "for i in range(10):\n    print(i)\nfor i in range(20):\n    print(i)\nfor i in range(30):\n",
        "A rose is a rose is a rose is a",
        "Alpha one, beta two, gamma three, delta four. Say it again: Alpha one, beta two,",
    ]
    return [tokenizer.encode(text) for text in texts]


@pytest.fixture(scope="module")
def without(rig, copying) -> list[list[int]]:
    return rig.run(rig.core(prefix_caching=False), copying, LONGER, eos_token_ids=())


def test_ordinary_prompts_few_at_a_time(rig, prompts, reference):
    core = rig.core(overlap=True, max_concurrent_requests=3, **ON)
    assert rig.run(core, prompts[:12], GREEDY) == reference.tokens[:12]
    assert core.stats().accepted_tokens_total > 0


@OVERLAP
def test_prompts_that_copy_take_fewer_steps_for_the_same_tokens(rig, copying, without, overlap):
    core = rig.core(prefix_caching=False, overlap=overlap, **ON)
    taken = []
    for prompt, expected in zip(copying, without, strict=True):
        before = core.stats()
        assert rig.run(core, [prompt], LONGER, eos_token_ids=()) == [expected]
        after = core.stats()
        steps = after.steps_total - before.steps_total
        accepted = after.accepted_tokens_total - before.accepted_tokens_total
        assert steps + accepted == 32, "each step brings one token and those accepted"
        taken.append(steps)
    assert sorted(taken)[1] < 16, taken


@OVERLAP
def test_with_prefix_hits_and_chunked_prefill(rig, copying, without, overlap):
    core = rig.core(block_size=16, prefill_chunk=11, overlap=overlap, **ON)
    for _ in range(2):
        assert rig.run(core, copying, LONGER, eos_token_ids=()) == without
    assert sum(rig.outputs[str(i)].num_cached_tokens for i in range(len(copying))) > 60
    assert core.stats().accepted_tokens_total > 0


@OVERLAP
def test_a_conversation_that_goes_on_reads_blocks_that_drafts_filled(rig, copying, without, overlap):
    """KV of accepted drafts is what a step of its own would have written."""
    core = rig.core(block_size=16, overlap=overlap, **ON)
    rig.run(core, copying, LONGER, eos_token_ids=())
    longer = [prompt + tokens[:20] for prompt, tokens in zip(copying, without, strict=True)]
    rest = SamplingParams(temperature=0, max_tokens=12)
    assert rig.run(core, longer, rest, eos_token_ids=()) == [tokens[20:] for tokens in without]
    for i, prompt in enumerate(longer):
        assert rig.outputs[str(i)].num_cached_tokens >= (len(prompt) - 1) // 16 * 16 - 16


@OVERLAP
def test_under_preemption(rig, copying, without, overlap):
    need = max(-(-(len(prompt) + 32) // 16) for prompt in copying)
    core = rig.core(block_size=16, num_kv_blocks=need + 4, overlap=overlap, **ON)
    assert rig.run(core, copying, LONGER, eos_token_ids=()) == without
    stats = core.stats()
    assert stats.preemptions_total > 0
    assert stats.accepted_tokens_total > 0


@pytest.mark.parametrize("max_tokens", [1, 2, 6, 21])
def test_max_tokens_is_met_exactly(rig, copying, without, max_tokens):
    core = rig.core(**ON)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    got = rig.run(core, copying, params, eos_token_ids=())
    assert got == [tokens[:max_tokens] for tokens in without]
    assert {output.finish_reason for output in rig.outputs.values()} == {"length"}


def test_an_end_token_inside_a_draft_ends_the_sequence(rig, copying, without):
    core = rig.core(**ON)
    for prompt, tokens in zip(copying, without, strict=True):
        for eos in {tokens[5], tokens[9]}:
            (got,) = rig.run(core, [prompt], LONGER, eos_token_ids=(eos,))
            assert got == tokens[: tokens.index(eos) + 1]
            assert rig.outputs["0"].finish_reason == "stop"


def test_a_stop_string_inside_a_draft_ends_the_text_there(rig, tokenizer, copying, without):
    """Several tokens in one output; what comes after the stop string is neither text nor counted."""
    core = rig.core(**ON)
    prompt, tokens = copying[0], without[0]
    params = SamplingParams(temperature=0, max_tokens=32, stop=("red, green",))
    processor = OutputProcessor(tokenizer)
    (request,) = processor.add(rig.request("r", prompt, params, eos_token_ids=()))
    core.add_request(request)
    text, ids, reason = "", [], None
    while core.has_work():
        for output in core.step():
            deltas, aborts = processor.process(output)
            for delta in deltas:
                text, ids, reason = text + delta.text, ids + delta.token_ids, delta.stop_reason or reason
            for child in aborts:
                core.abort(child)
    core.check_integrity()
    assert core.stats().blocks_used == 0
    assert reason == "red, green"
    assert ids == tokens[: len(ids)]
    whole = tokenizer.decode(tokens)
    assert text == whole[: whole.index("red, green")]


@OVERLAP
def test_an_abort_in_the_middle_of_a_draft_leaves_the_others_exact(rig, copying, without, overlap):
    core = rig.core(block_size=16, overlap=overlap, **ON)

    def abort(step: int, tokens: dict[str, list[int]]) -> None:
        if step in (3, 5):
            core.abort(str(step // 5))

    got = rig.run(core, copying, LONGER, eos_token_ids=(), on_step=abort)
    assert [rig.outputs[str(i)].finish_reason for i in (0, 1)] == ["abort", "abort"]
    assert got[2:] == without[2:]
    assert got[:2] == [without[i][: len(got[i])] for i in (0, 1)]


@OVERLAP
def test_sampled_requests_draw_the_tokens_they_would_draw_without(rig, copying, overlap):
    """Noise is a function of seed and position, so that acceptance is equality here too. Few of these 128
    draws come so near to a tie that the other order of additions could decide: none, if all are equal."""
    params = [
        SamplingParams(temperature=0.4, max_tokens=32),
        SamplingParams(temperature=0.7, top_p=0.8, max_tokens=32),
        SamplingParams(temperature=0.3, top_k=5, min_p=0.1, max_tokens=32, logit_bias={260: 0.5}),
        SamplingParams(temperature=0, max_tokens=32, min_tokens=20, logprobs=2),
    ]
    expected = rig.run(rig.core(prefix_caching=False), copying, params)
    logprobs = [entry for output in rig.all_outputs for entry in output.logprobs or ()]
    core = rig.core(prefix_caching=False, overlap=overlap, **ON)
    assert rig.run(core, copying, params) == expected
    assert core.stats().accepted_tokens_total > 8
    again = [entry for output in rig.all_outputs for entry in output.logprobs or ()]
    assert [entry.token_id for entry in again] == [entry.token_id for entry in logprobs]
    assert [entry.logprob for entry in again] == pytest.approx(
        [entry.logprob for entry in logprobs], abs=2e-3
    )


def test_penalties_and_structured_output_are_served_without_drafts(rig, copying):
    params = [
        SamplingParams(temperature=0, max_tokens=24, repetition_penalty=1.2),
        SamplingParams(temperature=0, max_tokens=24, structured=StructuredSpec(kind="regex", value="(ab)+")),
    ]
    expected = rig.run(rig.core(), copying[1:3], params)
    core = rig.core(**ON)
    assert rig.run(core, copying[1:3], params) == expected
    assert core.stats().drafted_tokens_total == 0
