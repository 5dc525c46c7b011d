"""Thoughts on the real model: the same tokens overlapped, with drafts, preempted and resumed."""

from __future__ import annotations

import pytest

from leadline.engine.frontend.structured import GrammarCompiler
from leadline.engine.messages import ThoughtSpec
from leadline.engine.sampling_params import SamplingParams, StructuredSpec

OPEN, END, NEWLINE = 11, 12, 198  # <jupyter_start>, <jupyter_text>, "\n"
BUDGETS = (0, 5)
COLORS = StructuredSpec("regex", "(red|green|blue), (red|green|blue)")


def thought(budget: int | None, begins="inside") -> ThoughtSpec:
    return ThoughtSpec(begins=begins, ends=((END,),), opens=((OPEN,),), budget=budget, closing=(NEWLINE, END))


def run(rig, core, prompts, sampling, budget, **fields):
    return rig.run(core, prompts, sampling, thought=thought(budget), **fields)


@pytest.fixture(scope="module")
def some(prompts):
    return prompts[:3]


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer)


def follows(compiler, tokens) -> bool:
    matcher = compiler.matcher(COLORS)
    return all(matcher.accept(token) for token in tokens)


@pytest.fixture(scope="module")
def answers(rig, some):
    """By budget: tokens of a server that reads each step before the next, without and with a grammar."""
    core = rig.core(overlap=False, prefix_caching=False)
    free = SamplingParams(temperature=0.8, max_tokens=24, logit_bias={2: -100.0})
    bound = SamplingParams(temperature=0.8, max_tokens=24, logit_bias={2: -100.0}, structured=COLORS)
    found = {
        (budget, sampling.structured is not None): run(rig, core, some, sampling, budget)
        for budget in BUDGETS
        for sampling in (free, bound)
    }
    return free, bound, found


def test_a_budget_forces_the_closing_tokens_and_the_grammar_begins_behind_them(compiler, answers):
    _, _, found = answers
    for (budget, bound), outputs in found.items():
        for tokens in outputs:
            assert END not in tokens[: budget + 1]
            assert tokens[budget : budget + 2] == [NEWLINE, END]
            if bound:
                assert follows(compiler, tokens[budget + 2 :])
                assert len(tokens) < 24, "the grammar ends the answer"


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap": True},
        {"overlap": True, "speculative_ngram": 4, "speculative_match": 1, "speculative_max_batch": 64},
        {"overlap": True, "block_size": 16, "prefill_chunk": 7, "num_kv_blocks": 5},
    ],
    ids=["overlap", "overlapped drafts", "preemption"],
)
def test_tokens_do_not_depend_on_how_steps_are_run(rig, some, answers, settings):
    free, bound, found = answers
    core = rig.core(**settings)
    for budget in BUDGETS:
        for sampling in (free, bound):
            wanted = found[budget, sampling.structured is not None]
            assert run(rig, core, some, sampling, budget) == wanted, (budget, sampling.structured)
    assert (core.stats().preemptions_total > 0) == ("num_kv_blocks" in settings)


@pytest.mark.parametrize("done", [2, 6, 9])
def test_a_resumed_output_goes_on_with_the_same_tokens(rig, some, answers, done):
    _, bound, found = answers
    core = rig.core(overlap=True)
    outputs = found[5, True]
    longer = [prompt + tokens[:done] for prompt, tokens in zip(some, outputs, strict=True)]
    rest = run(rig, core, longer, bound, 5, num_resumed=done)
    assert rest == [tokens[done:] for tokens in outputs]


def test_penalties_see_only_tokens_that_count(rig, some):
    sampling = SamplingParams(
        temperature=0, max_tokens=24, presence_penalty=1.0, structured=COLORS, logit_bias={2: -100.0}
    )
    wanted = run(rig, rig.core(overlap=False), some, sampling, 6)
    assert run(rig, rig.core(overlap=True), some, sampling, 6) == wanted


def test_where_the_model_may_open_its_thought_both_ways_end_in_the_grammar(rig, some, compiler):
    core = rig.core(overlap=True)
    opens = SamplingParams(
        temperature=0, max_tokens=24, structured=COLORS, logit_bias={2: -100.0, OPEN: 100.0}
    )
    plain = SamplingParams(temperature=0, max_tokens=24, structured=COLORS)
    for sampling, first in ((opens, True), (plain, False)):
        for tokens in rig.run(core, some, sampling, thought=thought(4, "maybe")):
            assert (tokens[0] == OPEN) is first
            answer = tokens[1 + 4 + 2 :] if first else tokens
            assert follows(compiler, answer)
