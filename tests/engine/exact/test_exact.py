"""Token-exact against transformers, greedy float32, however the work is cut up.

The demo model runs twice, all other cases on its shallow copy."""

from __future__ import annotations

import random

import pytest
from exact_prompts import NEW_TOKENS

from leadline.engine.sampling_params import SamplingParams

# The first run computes the reference with transformers.
pytestmark = pytest.mark.timeout(900)

GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])


@pytest.fixture(scope="module")
def rig(shallow_rig):
    """Of few layers: how work is cut up does not depend on their number."""
    return shallow_rig


@pytest.fixture(scope="module")
def tokens(shallow_reference) -> list[list[int]]:
    return shallow_reference.tokens


def test_no_prompt_meets_a_near_tie(reference, shallow_reference, prompts):
    """Below 1e-4 the order of additions may decide; such a prompt proves nothing and must be replaced."""
    assert len(prompts) == len(shallow_reference.gaps) == 30
    assert min(shallow_reference.gaps) > 1e-4, sorted(zip(shallow_reference.gaps, range(30), strict=True))[:3]
    assert min(reference.gaps) > 1e-4, reference.gaps
    assert len({token for answer in shallow_reference.tokens for token in answer}) > 150, "answers vary"


@pytest.mark.parametrize(
    "settings", [{}, {"block_size": 16, "prefill_chunk": 33, "num_kv_blocks": 40}], ids=str
)
def test_the_whole_demo_model_is_exact(whole_rig, prompts, reference, settings):
    """As served by default; then in chunks, with prefix hits and preemption."""
    core = whole_rig.core(**settings)
    some = [i for i in range(30) if reference.tokens[i]]
    assert len(some) >= 18
    assert whole_rig.run(core, [prompts[i] for i in some], GREEDY) == [reference.tokens[i] for i in some]
    assert (core.stats().preemptions_total > 0) == bool(settings)


def test_each_prompt_alone(rig, prompts, tokens):
    core = rig.core(prefix_caching=False)
    for prompt, expected in zip(prompts, tokens, strict=True):
        assert rig.run(core, [prompt], GREEDY) == [expected]


@pytest.mark.parametrize(("block_size", "overlap"), [(16, True), (64, True), (64, False), (256, True)])
def test_all_prompts_in_one_batch(rig, prompts, tokens, block_size, overlap):
    core = rig.core(prefix_caching=False, block_size=block_size, overlap=overlap)
    assert rig.run(core, prompts, GREEDY) == tokens


@pytest.mark.parametrize(
    ("chunk", "budget", "overlap"), [(7, 8192, False), (64, 8192, True), (None, 72, True), (33, 100, False)]
)
def test_prompts_prefilled_in_chunks(rig, prompts, tokens, chunk, budget, overlap):
    core = rig.core(
        prefix_caching=False,
        block_size=16,
        prefill_chunk=chunk,
        max_num_batched_tokens=budget,
        max_concurrent_requests=32,
        overlap=overlap,
    )
    assert rig.run(core, prompts, GREEDY) == tokens


@OVERLAP
@pytest.mark.parametrize("block_size", [16, 64])
def test_prefix_hits_at_and_off_block_boundaries(rig, prompts, tokens, block_size, overlap):
    """E6, E7: the first run shares prefixes in flight, the second finds everything cached."""
    core = rig.core(block_size=block_size, overlap=overlap)
    assert rig.run(core, prompts, GREEDY) == tokens
    first = {i: rig.outputs[str(i)].num_cached_tokens for i in range(30)}
    assert any(first.values()), "no prompt of the first run shared a block with another"
    assert rig.run(core, prompts, GREEDY) == tokens
    for i, prompt in enumerate(prompts):
        # All full blocks but the one that holds the last token, which is computed again.
        assert rig.outputs[str(i)].num_cached_tokens == (len(prompt) - 1) // block_size * block_size


def test_a_conversation_that_goes_on_hits_the_blocks_its_answer_filled(rig, prompts, tokens):
    core = rig.core(block_size=16)
    rig.run(core, prompts, GREEDY)
    cut = NEW_TOKENS // 2
    longer = [p + t[:cut] for p, t in zip(prompts, tokens, strict=True) if len(t) == NEW_TOKENS]
    expected = [t[cut:] for t in tokens if len(t) == NEW_TOKENS]
    assert len(longer) > 15
    rest = SamplingParams(temperature=0, max_tokens=NEW_TOKENS - cut)
    assert rig.run(core, longer, rest) == expected
    hits = [rig.outputs[str(i)].num_cached_tokens for i in range(len(longer))]
    assert sum(hits) >= sum((len(p) - 1) // 16 * 16 for p in longer) * 0.9


@OVERLAP
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_pool_so_small_that_sequences_are_preempted(rig, prompts, tokens, prefix_caching, overlap):
    """E8, E9."""
    core = rig.core(block_size=16, num_kv_blocks=26, overlap=overlap, prefix_caching=prefix_caching)
    assert rig.run(core, prompts, GREEDY) == tokens
    assert core.stats().preemptions_total > 0
    assert core.stats().generated_tokens_total == sum(map(len, tokens))


@OVERLAP
def test_requests_that_stay_are_exact_while_others_are_aborted(rig, prompts, tokens, overlap):
    core = rig.core(block_size=16, num_kv_blocks=60, overlap=overlap)
    rng = random.Random(5)
    doomed = {i: rng.randint(1, 20) for i in rng.sample(range(30), 14)}

    def abort(step: int, _: dict[str, list[int]]) -> None:
        for i, when in doomed.items():
            if step == when:
                core.abort(str(i))

    got = rig.run(core, prompts, GREEDY, on_step=abort)
    aborted = {i for i in range(30) if rig.outputs[str(i)].finish_reason == "abort"}
    assert aborted <= set(doomed)
    assert len(aborted) >= 8
    for i in range(30):
        if i in aborted:
            assert got[i] == tokens[i][: len(got[i])]
        else:
            assert got[i] == tokens[i]
    assert rig.run(core, prompts, GREEDY) == tokens


@OVERLAP
def test_requests_that_arrive_while_others_run(rig, prompts, tokens, overlap):
    core = rig.core(block_size=64, overlap=overlap)
    got: dict[str, list[int]] = {}
    waiting = list(enumerate(prompts))
    while waiting or core.has_work():
        for _ in range(2):
            if waiting:
                i, prompt = waiting.pop(0)
                got[str(i)] = []
                core.add_request(rig.request(str(i), prompt, GREEDY))
        for output in core.step():
            got[output.request_id] += output.new_token_ids
    core.check_integrity()
    assert [got[str(i)] for i in range(30)] == tokens
