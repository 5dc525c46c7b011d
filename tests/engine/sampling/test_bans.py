"""Allowed tokens and bad words in the sampler: each row gets its own, and the words see its output so far."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_rig import Rig

from leadline.engine.core.plan import NewSeq
from leadline.engine.sampling_params import SamplingParams

VOCAB = 40
GREEDY = {"temperature": 0.0}


def falling(rows: int) -> torch.Tensor:
    """Logits of which entry 0 is the largest, then 1, and so on."""
    return torch.arange(VOCAB, 0, -1, dtype=torch.float32).expand(rows, -1).clone()


def test_only_allowed_tokens_are_drawn_and_other_rows_stay_free():
    rig = Rig([SamplingParams(**GREEDY, allowed_token_ids=(7, 5)), SamplingParams(**GREEDY)], VOCAB)
    assert rig.draw(falling(2))[0] == [5, 0]


def test_sampled_rows_never_leave_the_allowed_tokens():
    params = SamplingParams(temperature=2.0, allowed_token_ids=(3, 11, 30))
    rig = Rig([params] * 500, VOCAB, seeds=list(range(500)))
    assert set(rig.draw(falling(500) / 20)[0]) == {3, 11, 30}


def test_a_word_of_one_token_is_never_drawn():
    rig = Rig([SamplingParams(**GREEDY, bad_words=((0,), (1,)))], VOCAB)
    assert [rig.draw(falling(1), step)[0] for step in range(3)] == [[2]] * 3


def test_a_words_last_token_is_forbidden_only_behind_the_others():
    rig = Rig([SamplingParams(**GREEDY, bad_words=((0, 0, 0), (0, 1, 0)))], VOCAB)
    # 0 0, then not a third 0 but 1; now 0 would end the word 0 1 0.
    assert [rig.draw(falling(1), step)[0][0] for step in range(6)] == [0, 0, 1, 1, 0, 0]


def test_a_prompt_begins_no_word_but_output_before_a_preemption_does():
    params = SamplingParams(**GREEDY, bad_words=((9, 0),))
    assert Rig([params], VOCAB, tokens=[[4, 9]]).draw(falling(1))[0] == [0]
    assert Rig([params], VOCAB, tokens=[[4, 9]], prompt_lens=[1]).draw(falling(1))[0] == [1]


def test_a_forced_token_passes_both():
    params = SamplingParams(**GREEDY, allowed_token_ids=(0, 1), bad_words=((8,),))
    mask = np.zeros(2, dtype=np.int32)
    mask[0] = 1 << 8
    rig = Rig([params, params], VOCAB)
    assert rig.draw(falling(2), masks={0: mask})[0] == [8, 0]


WORDS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=4), st.data())
def test_any_mixture_of_rows_equals_a_search_in_the_output(rows, data):
    """Slots change hands, tables grow; token 4 stays free, so there is always one to draw."""
    rig = Rig(
        [SamplingParams(**GREEDY, bad_words=tuple(words)) for words in rows], VOCAB, tokens=[[1]] * len(rows)
    )
    outputs: list[list[int]] = [[] for _ in rows]
    for step in range(8):
        if data.draw(st.booleans()):
            which = data.draw(st.integers(0, len(rows) - 1))
            rows[which] = data.draw(WORDS)
            kept = data.draw(st.booleans())  # the same sequence again, or another one
            outputs[which] = outputs[which] if kept else []
            params = SamplingParams(**GREEDY, bad_words=tuple(rows[which]))
            rig.sampler.release([which])
            rig.sampler.enter([NewSeq(which, 9, [1, *outputs[which]], 1, params, 0, [])])
        drawn = rig.draw(falling(len(rows)), step)[0]
        for words, output, token in zip(rows, outputs, drawn, strict=True):
            assert token == min(t for t in range(5) if not ends_with_one(words, [*output, t]))
            output.append(token)


def ends_with_one(words: list[tuple[int, ...]], output: list[int]) -> bool:
    return any(tuple(output[-len(word) :]) == word for word in words)
