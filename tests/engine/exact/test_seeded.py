"""Sampling by seed: the same draws alone, in a batch, after preemption and after a resumption elsewhere."""

from __future__ import annotations

import pytest

from leadline.engine.sampling_params import SamplingParams

SAMPLED = [
    SamplingParams(temperature=0.8, max_tokens=16),
    SamplingParams(temperature=1.0, top_p=0.9, max_tokens=16),
    SamplingParams(temperature=0.9, top_k=40, max_tokens=16),
    SamplingParams(temperature=1.1, min_p=0.05, presence_penalty=0.5, max_tokens=16),
    SamplingParams(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.2, max_tokens=16),
]


@pytest.fixture(scope="module")
def rig(shallow_rig):
    return shallow_rig


def test_a_seed_draws_the_same_alone_and_in_a_batch(rig, prompts):
    """E25."""
    some = prompts[:10]
    params = [SAMPLED[i % 5] for i in range(10)]
    core = rig.core(prefix_caching=False)
    together = rig.run(core, some, params, seeds=list(range(10)))
    for i in range(10):
        assert rig.run(core, [some[i]], [params[i]], seeds=[i]) == [together[i]]
    assert rig.run(core, some, params, seeds=[i + 100 for i in range(10)]) != together


def test_two_requests_with_one_seed_and_prompt_give_one_text(rig, prompts):
    core = rig.core()
    first, second, other = rig.run(core, [prompts[1]] * 3, SAMPLED[0], seeds=[7, 7, 8])
    assert first == second
    assert first != other


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_preemption_does_not_change_what_a_seed_draws(rig, prompts, overlap):
    some = prompts[:8]  # one block each at first, two in the end
    params = [SAMPLED[i % 5] for i in range(len(some))]
    roomy = rig.run(rig.core(block_size=16), some, params, eos_token_ids=())
    core = rig.core(block_size=16, num_kv_blocks=11, overlap=overlap)
    assert rig.run(core, some, params, eos_token_ids=()) == roomy
    assert core.stats().preemptions_total > 0


def test_an_answer_resumed_on_another_engine_continues_with_the_same_draws(rig, prompts):
    for params in SAMPLED:
        whole = rig.run(rig.core(), [prompts[1]], params, seeds=[3], eos_token_ids=())[0]
        resumed = rig.run(
            rig.core(), [prompts[1] + whole[:6]], params, seeds=[3], eos_token_ids=(), num_resumed=6
        )
        assert resumed == [whole[6:]]
