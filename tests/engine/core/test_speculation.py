"""Drafts: where they come from, and that nothing but speed depends on them."""

from __future__ import annotations

import pytest
from core_sim import EOS, Loop, digests, expected, fold, request, sample
from hypothesis import given
from hypothesis import strategies as st
from test_scheduler_random import _SETTINGS, SchedulerMachine

from leadline.engine.config import EngineConfig
from leadline.engine.core.drafter import NgramIndex
from leadline.engine.core.speculation import accepted
from leadline.engine.errors import ConfigError


class Oracle:
    """Knows what comes, and is wrong at every `period`-th position (0: never)."""

    def __init__(self, seed: int, period: int) -> None:
        self.seed, self.period, self.seen = seed, period, 0

    def propose(self, tokens, limit: int) -> list[int]:
        assert len(tokens) > self.seen, "asked twice about the same tokens"
        self.seen = len(tokens)
        state, draft = digests(list(tokens), self.seed)[-1], []
        while len(draft) < limit:
            token = sample(state)
            if self.period and (len(tokens) + len(draft)) % self.period == 0:
                token = (token + 1) % 40
            draft.append(token)
            state = fold(state, token)
        return draft


def oracle(period: int):
    return lambda req: Oracle(req.seed, period)


def speculating(num_blocks: int = 200, period: int = 0, **settings) -> Loop:
    settings = {"speculative_ngram": 4, "speculative_max_batch": 8, **settings}
    return Loop(num_blocks, make_drafter=oracle(period), **settings)


# -- prompt lookup -------------------------------------------------------------------------------------------


def test_a_draft_is_what_followed_the_latest_tokens_before() -> None:
    assert NgramIndex(2).propose([9, 1, 2, 3, 4, 5, 8, 1, 2], 3) == [3, 4, 5]
    assert NgramIndex(2).propose([9, 1, 2, 3, 4, 5, 8, 2, 1], 3) == []
    assert NgramIndex(3).propose([1, 2], 3) == []


def test_of_two_occurrences_the_one_that_agrees_further_back_decides() -> None:
    tokens = [7, 5, 1, 2, 3, 0, 6, 1, 2, 4, 7, 5, 1, 2]
    assert NgramIndex(2).propose(tokens, 1) == [3]
    assert NgramIndex(2).propose(tokens[3:], 1) == [4]  # no longer there: the latest


def test_a_draft_that_reaches_the_end_repeats_the_period() -> None:
    assert NgramIndex(2).propose([5, 1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]
    assert NgramIndex(1).propose([4, 4], 3) == [4, 4, 4]


@given(
    tokens=st.lists(st.integers(0, 3), max_size=60),
    match=st.integers(1, 3),
    limit=st.integers(0, 6),
    cuts=st.sets(st.integers(0, 60)),
)
def test_an_index_that_grew_proposes_what_a_fresh_one_does(tokens, match, limit, cuts) -> None:
    grown = NgramIndex(match)
    for cut in sorted(cut for cut in cuts if cut < len(tokens)):
        grown.propose(tokens[:cut], limit)
    draft = grown.propose(tokens, limit)
    assert draft == NgramIndex(match).propose(tokens, limit)
    assert len(draft) in (0, limit)
    if draft:
        run, places = tokens[len(tokens) - match :], range(match, len(tokens))
        assert any(tokens[end - match : end] == run and tokens[end] == draft[0] for end in places)


def test_drafted_tokens_count_up_to_the_first_that_was_not_sampled() -> None:
    assert accepted([1, 2, 3], [1, 2, 3, 9]) == 3
    assert accepted([1, 2, 3], [1, 7, 3, 9]) == 1
    assert accepted([1], [2, 9]) == 0


# -- the scheduler -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("period", [0, 1, 3])
def test_tokens_are_those_without_drafts_however_good_they_are(depth, period) -> None:
    loop = speculating(period=period, depth=depth)
    for i in range(5):
        loop.add(request(f"r{i}", list(range(1, 8 + i)), salt=i, max_tokens=40))
    loop.run()
    loop.check_exact()
    stats = loop.scheduler.stats()
    assert (stats.drafted_tokens_total, stats.accepted_tokens_total) == (
        loop.runner.drafted,
        loop.runner.accepted,
    )
    assert stats.generated_tokens_total == 5 * 40
    assert stats.drafted_tokens_total > 0
    assert (stats.accepted_tokens_total > 0) == (period != 1)


def test_right_drafts_bring_several_tokens_a_step() -> None:
    loop = speculating()
    loop.add(request("r", [1, 2, 3], max_tokens=41))
    loop.run()
    loop.check_exact()
    assert loop.scheduler.stats().steps_total == 1 + 40 // 5
    assert len(loop.outputs["r"][1].new_token_ids) == 5


def test_a_sequence_whose_drafts_fail_stops_trying_for_a_while() -> None:
    loop = speculating(period=1, block_size=16)
    loop.add(request("r", [1, 2, 3], max_tokens=200))
    loop.run()
    loop.check_exact()
    assert loop.runner.drafted < 4 * 10, "ten tries in 200 tokens"


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_no_draft_goes_beyond_max_tokens(max_tokens) -> None:
    loop = speculating()
    loop.add(request("r", [5, 6, 7], max_tokens=max_tokens))
    loop.run()
    loop.check_exact()
    assert (
        max(start + count for step in loop.runner.rows_log for _, start, count, _ in step) <= 2 + max_tokens
    )


def test_a_stop_token_inside_a_draft_ends_the_sequence_there() -> None:
    req = request("r", [3, 1, 4], max_tokens=60)
    tokens, _ = expected(req, 400)
    for stop in {tokens[i] for i in range(1, 12)}:
        loop = speculating()
        loop.add(request("r", [3, 1, 4], max_tokens=60, stop_token_ids=(stop,)))
        loop.run()
        loop.check_exact()
        assert loop.final["r"].stop_token_id == stop


def test_drafts_stop_where_more_sequences_decode_than_pay() -> None:
    loop = speculating(speculative_max_batch=2)
    for i in range(3):
        loop.add(request(f"r{i}", [1, 2, i + 3], salt=i, max_tokens=12 if i else 30))
    loop.run()
    loop.check_exact()
    together = [step for step in loop.runner.rows_log if len(step) == 3]
    assert together
    assert all(count == 1 for step in together[1:] for _, _, count, _ in step)
    assert loop.runner.drafted > 0, "the last sequence is alone at the end"


def test_requests_whose_tokens_depend_on_the_order_of_steps_do_not_draft() -> None:
    loop = speculating()
    for i, changes in enumerate(
        (
            {"repetition_penalty": 1.1},
            {"presence_penalty": 0.5},
            {"frequency_penalty": 0.5},
            {"structured": True},
        )
    ):
        loop.add(request(f"r{i}", [1, 2, i + 3], salt=i, max_tokens=12, **changes))
    loop.run()
    assert loop.runner.drafted == 0


def test_nobody_is_preempted_for_a_draft() -> None:
    def run(ngram: int) -> int:
        loop = speculating(12, speculative_ngram=ngram)
        for i in range(2):
            loop.add(request(f"r{i}", [1, 2, 3], salt=i, max_tokens=20))
        loop.run()
        loop.check_exact()
        return loop.scheduler.stats().preemptions_total

    assert run(0) == run(4) == 0


def test_whoever_overlaps_is_told_to_read_first_only_while_a_draft_is_hoped_for() -> None:
    loop = speculating(period=1, depth=1)
    loop.add(request("r", [1, 2, 3], max_tokens=100))
    waits = []
    while loop.scheduler.has_work():
        if loop.scheduler.wants_to_draft and loop.flights:
            waits.append(len(loop.tokens["r"]))
            loop.read()
        else:
            loop.step()
    assert 0 < len(waits) < 30, "most steps overlap while drafts fail"
    assert loop.runner.drafted > 0


class Drafting(SchedulerMachine):
    """The random machine, with drafts of every quality."""

    def make_loop(self, num_blocks, **settings) -> Loop:
        drafters = [oracle(period) for period in (0, 2, 3, 5)]
        return Loop(
            num_blocks,
            make_drafter=lambda req: drafters[len(req.prompt_token_ids) % 4](req),
            speculative_ngram=5,
            speculative_max_batch=3,
            **settings,
        )


class DraftingInFlight(Drafting):
    depth = 2


class Looking(SchedulerMachine):
    """Prompt lookup itself: over 40 token ids, runs of one repeat all the time."""

    depth = 1

    def make_loop(self, num_blocks, **settings) -> Loop:
        return Loop(num_blocks, speculative_ngram=3, speculative_match=1, speculative_max_batch=8, **settings)


TestDrafting, TestDraftingInFlight, TestLooking = (
    Drafting.TestCase,
    DraftingInFlight.TestCase,
    Looking.TestCase,
)
TestDrafting.settings = TestDraftingInFlight.settings = TestLooking.settings = _SETTINGS


@pytest.mark.parametrize(
    ("name", "value"), [("speculative_ngram", 33), ("speculative_match", 0), ("speculative_max_batch", 0)]
)
def test_settings_that_cannot_work_are_refused_by_name(name, value) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig(model="m", **{name: value}).validate()


def test_eos_counts_inside_a_draft() -> None:
    loop = speculating()
    loop.add(request("r", [1, 2, 3], max_tokens=300, eos_token_ids=(EOS,)))
    loop.run()
    loop.check_exact()
