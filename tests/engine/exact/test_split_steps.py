"""Mixed steps in pieces give what whole steps give, token by token (runner/split.py).

On CPU, where no graph makes pieces cheaper: each is an eager step, and all that may be split is.
"""

from __future__ import annotations

import pytest
from exact_prompts import NEW_TOKENS

from leadline.engine.core_process.engine_core import EngineCore
from leadline.engine.runner.split import StepCosts, StepSplitter
from leadline.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.timeout(900)

GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
CHEAP = StepCosts(launch=1 << 40, decode={64: 1}, chunk={512: 1})
TIGHT = {"block_size": 16, "prefill_chunk": 7, "max_num_batched_tokens": 32, "max_concurrent_requests": 24}
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])


@pytest.fixture(scope="module")
def rig(shallow_rig):
    return shallow_rig


class Counting(StepSplitter):
    def __init__(self, core: EngineCore) -> None:
        super().__init__(core.runner.tables, core.config.block_size, CHEAP)
        self.split_steps = self.whole_steps = 0

    def split(self, plan):
        pieces = super().split(plan)
        self.split_steps += len(pieces) > 1
        self.whole_steps += len(pieces) == 1 and pieces[0] is not plan
        return pieces


def splitting(core: EngineCore) -> Counting:
    core.runner.splitter = counting = Counting(core)
    return counting


@OVERLAP
def test_chunks_beside_decode_rows_in_a_small_pool(rig, prompts, shallow_reference, overlap):
    """With preemption, and with prefixes that sequences of one step have in common."""
    core = rig.core(**TIGHT, num_kv_blocks=45, overlap=overlap)
    counting = splitting(core)
    assert rig.run(core, prompts, GREEDY) == shallow_reference.tokens
    assert core.stats().preemptions_total > 0
    assert counting.split_steps > 20
    assert counting.whole_steps > 0


def test_a_block_hit_in_the_step_that_computes_it(rig, prompts, shallow_reference):
    """A prompt twice in one step: the second one reads what the first one writes."""
    longest = max(range(30), key=lambda i: len(prompts[i]))
    core = rig.core(block_size=16, overlap=False)
    counting = splitting(core)
    some = [prompts[longest], prompts[longest], prompts[0]]
    expected = [shallow_reference.tokens[i] for i in (longest, longest, 0)]
    assert rig.run(core, some, GREEDY) == expected
    assert rig.outputs["1"].num_cached_tokens > 0
    assert counting.whole_steps > 0


def test_every_kind_of_sampling(rig, prompts):
    kinds = [
        SamplingParams(temperature=0.8, max_tokens=10, logprobs=2),
        SamplingParams(temperature=1.0, top_p=0.9, max_tokens=14),
        SamplingParams(temperature=0.9, top_k=40, max_tokens=3, logit_bias={284: 2.0}),
        SamplingParams(temperature=1.1, min_p=0.05, presence_penalty=0.5, max_tokens=12),
        SamplingParams(temperature=0.0, min_tokens=9, max_tokens=9, prompt_logprobs=1),
    ]
    params = [kinds[i % len(kinds)] for i in range(len(prompts))]
    whole, pieces = rig.core(**TIGHT), rig.core(**TIGHT)
    counting = splitting(pieces)
    expected = rig.run(whole, prompts, params)
    logprobs = [[entry and entry.token_id for entry in out.logprobs or []] for out in rig.all_outputs]
    assert rig.run(pieces, prompts, params) == expected
    assert [[entry and entry.token_id for entry in out.logprobs or []] for out in rig.all_outputs] == logprobs
    assert counting.split_steps > 10
