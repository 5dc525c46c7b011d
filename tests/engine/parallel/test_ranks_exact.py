"""Two, three and four ranks give what one rank gives, token by token (E10).

Every step of every engine here also compares a checksum of the sampled tokens over ranks (LEADLINE_TP_CHECK).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from exact_prompts import make_prompts
from parallel_rig import ParallelRig, tiny_model

from leadline.engine.core_process.engine_core import EngineCore
from leadline.engine.errors import EngineDead
from leadline.engine.hub import resolve_model
from leadline.engine.sampling_params import SamplingParams

SAMPLED = [
    SamplingParams(temperature=0.8, max_tokens=10),
    SamplingParams(temperature=1.0, top_p=0.9, max_tokens=14),
    SamplingParams(temperature=0.9, top_k=40, max_tokens=3, logit_bias={284: 2.0}),
    SamplingParams(temperature=1.1, min_p=0.05, presence_penalty=0.5, max_tokens=12),
    SamplingParams(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.2, max_tokens=8),
    SamplingParams(temperature=0.0, min_tokens=9, max_tokens=9),
]

ROOMY = {"block_size": 16, "prefill_chunk": 40, "overlap": False}


@pytest.fixture
def prompts(tokenizer) -> list[list[int]]:
    """Short and long, with shared prefixes, some of them inside a block."""
    return make_prompts(tokenizer)[::2]


@pytest.fixture(scope="module")
def three(local) -> Iterator[EngineCore]:
    """An engine with space for all prompts."""
    built = ParallelRig(local)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEADLINE_TP_CHECK", "1")
        yield built.core(3, **ROOMY)
    built.close()


def test_many_requests_some_finishing_early_then_again_with_prefix_hits(rig, three, prompts):
    greedy = [SamplingParams(temperature=0, max_tokens=2 + 3 * (i % 5)) for i in range(len(prompts))]
    one = rig.core(**ROOMY)
    expected = rig.run(one, prompts, greedy)
    assert three.num_kv_blocks == one.num_kv_blocks
    assert rig.run(three, prompts, greedy) == expected
    assert rig.run(three, prompts, greedy) == expected
    hits = [rig.outputs[str(i)].num_cached_tokens for i in range(len(prompts))]
    assert hits == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]


def test_a_pool_so_small_that_sequences_are_preempted(rig, ranks, prompts):
    """Two ranks, whose heads are padded (9 and 3 do not divide), with steps launched before the last one is
    read. Then seeds, penalties and bans on the same engine: preempted sequences bring their counts back."""
    greedy = SamplingParams(temperature=0, max_tokens=12)
    settings = {"block_size": 16, "num_kv_blocks": 13, "overlap": True}
    few = prompts[:8] + prompts[-2:]
    one, core = rig.core(**settings), ranks.core(2, **settings)
    assert rig.run(core, few, greedy, eos_token_ids=()) == rig.run(one, few, greedy, eos_token_ids=())
    preempted = core.stats().preemptions_total
    params = [SAMPLED[i % len(SAMPLED)] for i in range(len(few))]
    expected = rig.run(one, few, params, eos_token_ids=(0,))
    assert rig.run(core, few, params, eos_token_ids=(0,)) == expected
    assert core.stats().preemptions_total > preempted > 0


def test_four_ranks_for_three_kv_heads(rig, ranks, prompts):
    greedy = SamplingParams(temperature=0, max_tokens=6)
    some = prompts[4:10]
    assert rig.run(ranks.core(4), some, greedy) == rig.run(rig.core(), some, greedy)


def test_logprobs_of_prompt_and_output_are_those_of_one_rank(rig, three, prompts):
    three.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2)
    some = [prompts[0], prompts[-1], prompts[9]]
    seen = []
    for core in (rig.core(**ROOMY), three):
        rig.run(core, some, params)
        seen.append(
            [
                (entry.token_id, pytest.approx(entry.logprob, abs=1e-3))
                # By request: how far each gets in a step may depend on the time that steps take.
                for output in sorted(rig.all_outputs, key=lambda one: one.request_id)
                for entry in [*(output.prompt_logprobs or []), *(output.logprobs or [])]
            ]
        )
    assert len(seen[0]) == sum(len(prompt) - 1 for prompt in some) + 12
    assert [token for token, _ in seen[0]] == [token for token, _ in seen[1]]
    assert all(one[1].expected == other[1] for one, other in zip(*seen, strict=True))


def test_fp8_over_ranks_gives_mostly_the_tokens_of_float32(rig, ranks, prompts):
    """Each rank rounds its own slices, so one rank in FP8 has other bits. Padded heads (9 over 2).

    Of the whole demo model: logits of the shallow one lie so close together that rounding decides."""
    whole = resolve_model("smollm2", progress=False)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    some = prompts[:6]
    expected = rig.run(ranks.core(1, whole), some, greedy)
    found = rig.run(ranks.core(2, whole, quantization="fp8", kv_cache_dtype="fp8"), some, greedy)
    firsts = [one[0] == other[0] for one, other in zip(expected, found, strict=True)]
    assert sum(firsts) >= len(some) - 1
    same = [
        a == b for one, other in zip(expected, found, strict=True) for a, b in zip(one, other, strict=True)
    ]
    assert 0.4 * len(same) <= sum(same) < len(same), "rounded, and mostly right"


def test_ranks_that_disagree_are_found_by_the_check(rig, ranks, tmp_path):
    core = ranks.core(2, tiny_model(tmp_path, "llama"), max_model_len=128, cpu_kv_bytes=1 << 22)
    launch = core.runner.runner.launch

    def tampered(plan):
        handle = launch(plan)
        if handle.tokens is not None:
            handle.tokens = handle.tokens + 1
        return handle

    core.runner.runner.launch = tampered
    core.add_request(rig.request("a", [5, 6], SamplingParams(temperature=0, max_tokens=3)))
    with pytest.raises(EngineDead, match="disagree on the tokens of step"):
        core.step()
