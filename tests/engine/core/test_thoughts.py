"""Thoughts in the scheduler: a budget ends them, a grammar begins behind them, and they stay overlapped."""

from __future__ import annotations

import pytest
from core_sim import GRAMMAR_END, Loop, expected, request

from leadline.engine.core.sequence import Thought, answer_of
from leadline.engine.messages import ThoughtSpec

OPEN, END, NEWLINE = 38, 39, 37


def spec(begins="inside", budget=None, **changes) -> ThoughtSpec:
    fields = {"ends": ((END,),), "opens": ((OPEN,),), "closing": (NEWLINE, END), **changes}
    return ThoughtSpec(begins=begins, budget=budget, **fields)


def test_a_thought_ends_at_its_tag_and_the_answer_begins() -> None:
    thought = Thought(spec(), structured=True)
    for token in (1, 2, END):
        assert thought.allowed.anything
        thought.take(token)
    assert thought.answering
    assert not thought.in_answer, "the tag is no part of it"
    assert thought.allowed.grammar
    thought.take(5)
    assert thought.in_answer
    assert thought.num_tokens == 3


def test_where_the_model_opens_its_thought_the_first_token_decides() -> None:
    thinks, answers = Thought(spec("maybe"), structured=True), Thought(spec("maybe"), structured=True)
    assert (thinks.allowed.grammar, thinks.allowed.tokens) == (True, (OPEN,))
    thinks.take(OPEN)
    assert thinks.allowed.anything
    answers.take(5)
    assert answers.answering
    assert answers.in_answer


def test_white_space_in_front_of_an_opening_decides_nothing_unless_a_grammar_allows_it() -> None:
    """As the parser of the text has it."""
    blank = spec("maybe", budget=1, blanks=(NEWLINE,))
    thought = Thought(blank)
    for token in (NEWLINE, NEWLINE, OPEN, 1):
        assert not thought.answering
        thought.take(token)
    assert thought.allowed.tokens == (NEWLINE,), "the budget ends the thought"
    constrained = Thought(blank, structured=True)
    constrained.take(NEWLINE)
    assert constrained.answering
    assert constrained.in_answer


def test_messages_may_be_thoughts_until_the_answer_begins() -> None:
    channel, analysis, final, message = 30, 31, 32, 33
    opens, begins = ((channel, analysis, message),), ((channel, final, message),)
    thought = Thought(spec("between", 1, opens=opens, answers=begins, closing=(END, *begins[0])))
    seen = []
    for token in (channel, analysis, message, 1, END, channel, final, message, 5):
        seen.append(thought.allowed.tokens)
        thought.take(token)
    assert seen == [(), (), (), (), (END,), (channel,), (final,), (message,), ()]
    assert thought.in_answer


def test_between_messages_only_thoughts_and_answers_may_begin_where_the_answer_has_a_form() -> None:
    start, role, channel, analysis, final, json_, message = 28, 29, 30, 31, 32, 34, 33
    markers = {
        "opens": ((channel, analysis, message),),
        "answers": ((channel, final, message), (channel, final, json_, message)),
        "heading": (start, role),
    }
    thought = Thought(spec("between", **markers), structured=True)
    seen = []
    for token in (channel, analysis, message, 1, END, start, role, channel, final, json_, message):
        seen.append(thought.allowed.tokens)
        thought.take(token)
    wanted = [(channel,), (analysis, final), (message,), (), ()]
    assert seen == [*wanted, (start,), (role,), (channel,), (analysis, final), (message, json_), (message,)]
    assert thought.answering
    free = Thought(spec("between", **markers))
    for token in (channel, 7, message, 1):
        assert free.allowed.anything
        free.take(token)


def test_the_grammar_follows_only_what_a_resumed_output_has_of_the_answer() -> None:
    assert answer_of(spec(), [1, 2, END, 3, 4]) == [3, 4]
    assert answer_of(spec("maybe"), [3, 4]) == [3, 4]
    assert answer_of(None, [3, 4]) == [3, 4]


def prompt_whose_thought_ends(after: int) -> list[int]:
    """A prompt of which the simulated model closes its thought with token number `after`."""
    for first in range(1, 2000):
        prompt = [first % 37, first // 37, 1]
        tokens, _ = expected(request("r", prompt, max_tokens=30, thought=spec()), 400)
        if END in tokens and tokens.index(END) == after:
            return prompt
    raise AssertionError("none")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_thought_is_overlapped_and_only_the_token_behind_it_is_sampled_again(depth) -> None:
    prompt = prompt_whose_thought_ends(after=10)
    loop = Loop(200, depth=depth, block_size=4)
    loop.add(request("r", prompt, max_tokens=30, structured=True, thought=spec()))
    loop.run()
    loop.check_exact()
    tokens = loop.tokens["r"]
    assert all(token < GRAMMAR_END for token in tokens[11:])
    assert any(token >= GRAMMAR_END for token in tokens[:10])
    assert loop.runner.dropped == depth


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("budget", [0, 1, 6])
def test_a_budget_ends_the_thought_with_the_closing_tokens(depth, budget) -> None:
    loop = Loop(200, depth=depth, speculative_ngram=3, speculative_max_batch=8)
    for i in range(4):
        loop.add(request(f"r{i}", [1, 2, 3 + i], salt=i, max_tokens=20, thought=spec(budget=budget)))
    loop.run()
    loop.check_exact()
    forced = [tokens for tokens in loop.tokens.values() if END not in tokens[:budget]]
    assert forced
    assert all(tokens[budget : budget + 2] == [NEWLINE, END] for tokens in forced)


def test_tokens_that_penalties_count_are_never_dropped() -> None:
    loop = Loop(200, depth=1)
    prompt = prompt_whose_thought_ends(after=10)
    loop.add(request("r", prompt, max_tokens=30, structured=True, thought=spec(), presence_penalty=0.5))
    loop.run()
    loop.check_exact()
    assert loop.runner.dropped == 0


def test_a_thought_is_closed_before_min_tokens_by_a_token_that_stops_behind_them() -> None:
    loop = Loop(200)
    given = {"min_tokens": 12, "max_tokens": 12, "stop_token_ids": (END, NEWLINE)}
    loop.add(request("r", [1, 2, 3], thought=spec(budget=2), **given))
    loop.run()
    loop.check_exact()
    assert loop.tokens["r"][2:4] == [NEWLINE, END]
    assert len(loop.tokens["r"]) == 12
