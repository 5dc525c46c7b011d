"""The sampler against a plain numpy statement of each feature."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampler_rig import Rig, reference_distribution

from leadline.engine.sampling_params import SamplingParams

VOCAB = 40


def fixed_logits(rows: int = 1, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale


PARAMS = {
    "temperature": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=2.0),
    "top_k": SamplingParams(top_k=5),
    "top_p": SamplingParams(top_p=0.6),
    "min_p": SamplingParams(min_p=0.1),
    "all": SamplingParams(temperature=1.3, top_k=12, top_p=0.8, min_p=0.02),
    "penalties": SamplingParams(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.4),
    "bias": SamplingParams(logit_bias={0: 3.0, 7: -100.0, 39: 2.5}),
    "penalties and top_k": SamplingParams(presence_penalty=1.0, top_k=8, top_p=0.9),
}
PROMPT, OUTPUT = [3, 4, 5, 3], [6, 6, 7, 6, 30]


@pytest.mark.parametrize("name", PARAMS)
def test_draws_follow_the_reference_distribution(name: str):
    params, logits = PARAMS[name], fixed_logits()
    expected = reference_distribution(logits[0].numpy(), params, PROMPT, OUTPUT)
    n = 4000
    rig = Rig(
        [params] * n,
        VOCAB,
        seeds=list(range(n)),
        tokens=[PROMPT + OUTPUT] * n,
        prompt_lens=[len(PROMPT)] * n,
    )
    tokens, _ = rig.draw(logits.expand(n, -1))
    counts = np.bincount(tokens, minlength=VOCAB)
    assert counts[expected == 0].sum() == 0, "a token that truncation forbids was drawn"
    common = expected * n >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum()) * n
    wanted, observed = wanted[wanted > 1e-9], observed[wanted > 1e-9]
    chi_square = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    assert chi_square < freedom + 5 * (2 * max(freedom, 1)) ** 0.5, (name, chi_square, freedom)


def test_one_sequence_draws_the_distribution_over_its_positions_too():
    params, logits = SamplingParams(temperature=1.0), fixed_logits(vocab=8)
    expected = reference_distribution(logits[0].numpy(), params, [], [])
    rig = Rig([params], 8, seeds=[99])
    counts = np.bincount([rig.draw(logits, step)[0][0] for step in range(4000)], minlength=8)
    chi_square = float(((counts - expected * 4000) ** 2 / (expected * 4000)).sum())
    assert chi_square < 7 + 5 * 14**0.5


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 9e-4])
def test_a_tiny_temperature_is_greedy(temperature: float):
    """E14: no overflow, and the same token as greedy for every seed."""
    logits = fixed_logits(16) * 1000
    rig = Rig([SamplingParams(temperature=temperature, top_p=0.5)] * 16, VOCAB)
    assert rig.draw(logits)[0] == logits.argmax(dim=1).tolist()


def test_the_smallest_sampling_temperature_does_not_overflow():
    logits = fixed_logits(16) * 1e6
    rig = Rig([SamplingParams(temperature=1e-3)] * 16, VOCAB)
    assert rig.draw(logits)[0] == logits.argmax(dim=1).tolist()


def test_equal_logits_go_to_the_lowest_token_id():
    logits = torch.zeros(1, VOCAB)
    logits[0, [9, 11, 30]] = 5.0
    assert Rig([SamplingParams(temperature=0)], VOCAB).draw(logits)[0] == [9]
    assert Rig([SamplingParams(temperature=0)], VOCAB).draw(logits.bfloat16())[0] == [9]


def test_a_batch_that_mixes_everything_gives_each_row_what_it_gets_alone():
    params = [SamplingParams(temperature=0), *PARAMS.values(), SamplingParams(temperature=0, logprobs=3)]
    logits = fixed_logits(len(params), vocab=3000, seed=3)
    history = {"tokens": [PROMPT + OUTPUT] * len(params), "prompt_lens": [len(PROMPT)] * len(params)}
    slots = [2 * i + 1 for i in range(len(params))]
    together = Rig(params, 3000, seeds=list(range(len(params))), slots=slots, **history)
    alone = [
        Rig([p], 3000, seeds=[i], tokens=[PROMPT + OUTPUT], prompt_lens=[len(PROMPT)])
        for i, p in enumerate(params)
    ]
    for step in range(5):
        expected = [rig.draw(logits[i : i + 1], step)[0][0] for i, rig in enumerate(alone)]
        assert together.draw(logits, step)[0] == expected


@pytest.mark.parametrize("p", [0.05, 0.5, 0.95, 0.9999])
def test_top_p_over_a_flat_large_vocabulary_needs_more_than_the_first_sorted_entries(p: float):
    vocab = 5000
    logits = fixed_logits(2, vocab, scale=0.05)
    expected = [
        set(np.flatnonzero(reference_distribution(row.numpy(), SamplingParams(top_p=p), [], [])))
        for row in logits
    ]
    drawn: list[set[int]] = [set(), set()]
    rig = Rig([SamplingParams(top_p=p)] * 2, vocab)
    for step in range(300):
        for seen, token in zip(drawn, rig.draw(logits, step)[0], strict=True):
            seen.add(token)
    for seen, allowed in zip(drawn, expected, strict=True):
        # The edge of the nucleus may move by a token or two: sums of 5,000 float32 weights are not exact.
        assert len(seen - allowed) <= 2


def test_entries_tied_with_the_last_one_kept_are_all_kept():
    logits = torch.full((1, VOCAB), -50.0)
    logits[0, [3, 8, 20]] = 1.0
    rig = Rig([SamplingParams(top_k=1)], VOCAB)
    assert {rig.draw(logits, step)[0][0] for step in range(100)} == {3, 8, 20}


def test_penalties_count_tokens_as_they_are_sampled():
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, :3] = torch.tensor([2.5, 2.2, 2.0])
    rig = Rig([params], VOCAB, tokens=[[0, 0, 0]])  # a prompt does not count for frequency
    drawn = [rig.draw(logits, step)[0][0] for step in range(6)]
    expected, counts = [], [0] * 3
    for _ in range(6):
        scores = [logits[0, token].item() - counts[token] for token in range(3)]
        expected.append(int(np.argmax(scores)))
        counts[expected[-1]] += 1
    assert drawn == expected
    assert len(set(drawn)) == 3


def test_penalties_after_a_resumption_continue_where_they_stopped():
    params = SamplingParams(
        temperature=0.8, presence_penalty=0.7, repetition_penalty=1.2, frequency_penalty=0.3
    )
    logits = fixed_logits(1)
    whole = Rig([params], VOCAB, seeds=[4], tokens=[PROMPT])
    tokens = [whole.draw(logits, step)[0][0] for step in range(12)]
    resumed = Rig(
        [params], VOCAB, seeds=[4], tokens=[PROMPT + tokens[:5]], prompt_lens=[len(PROMPT)], slots=[3]
    )
    assert [resumed.draw(logits, step)[0][0] for step in range(7)] == tokens[5:]


def test_count_rows_are_reused_and_hold_nothing_of_their_last_owner():
    params = SamplingParams(temperature=0, frequency_penalty=2.0)
    rig = Rig([params] * 3, VOCAB)
    logits = fixed_logits(3)
    rig.draw(logits)
    rows = rig.sampler.counts.output.shape[0]
    for _ in range(10):
        rig.sampler.release([0, 1, 2])
        fresh = Rig([params] * 3, VOCAB)
        fresh.sampler = rig.sampler
        rig.sampler.enter(
            [_entering(slot, params) for slot in range(3)],
        )
        assert fresh.draw(logits)[0] == logits.argmax(dim=1).tolist()
    assert rig.sampler.counts.output.shape[0] == rows


def _entering(slot: int, params: SamplingParams):
    from leadline.engine.core.plan import NewSeq

    return NewSeq(
        slot=slot, seq_id=slot, token_ids=[1, 2, 3], prompt_len=3, sampling=params, seed=slot, block_ids=[]
    )


def test_sequences_without_penalties_take_no_count_rows():
    rig = Rig([SamplingParams(temperature=0.5)] * 8, VOCAB)
    assert rig.sampler.counts.output.shape[0] == 0


def test_eos_and_stop_ids_are_banned_until_min_tokens():
    """E23: several of them."""
    logits = torch.zeros(1, VOCAB)
    logits[0, [2, 5, 9]] = torch.tensor([9.0, 8.0, 7.0])
    logits[0, 1] = 1.0
    rig = Rig([SamplingParams(temperature=0, min_tokens=3)], VOCAB, banned=(2, 5, 9))
    assert [rig.draw(logits, step)[0][0] for step in range(5)] == [1, 1, 1, 2, 2]


def test_rows_with_bans_of_different_lengths_do_not_touch_each_other():
    params = [
        SamplingParams(temperature=0, logit_bias={1: 4.0}),
        SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(30), -100.0)),
        SamplingParams(temperature=0),
    ]
    logits = torch.zeros(3, VOCAB)
    logits[:, 0] = 3.0
    logits[:, 35] = 1.0
    assert Rig(params, VOCAB).draw(logits)[0] == [1, 35, 0]


@pytest.mark.parametrize("vocab", [40, 64, 65])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bitmask_allows_exactly_its_bits(vocab: int, temperature: float):
    allowed = [1, 31, 32, vocab - 1]
    words = np.zeros((vocab + 31) // 32, dtype=np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    logits = fixed_logits(2, vocab)
    rig = Rig([SamplingParams(temperature=temperature)] * 2, vocab)
    seen = {rig.draw(logits, step, {1: words.view(np.int32)})[0][1] for step in range(200)}
    unmasked = {rig.draw(logits, step, {1: words.view(np.int32)})[0][0] for step in range(200)}
    if temperature:
        assert seen <= set(allowed)
        assert len(seen) > 1
        assert not unmasked <= set(allowed)
    else:
        assert seen == {max(allowed, key=lambda token: float(logits[1, token]))}


def test_a_mask_that_allows_one_token_forces_it_whatever_its_logit():
    logits = fixed_logits(1)
    logits[0, 17] = -1e4
    words = np.zeros(2, dtype=np.int32)
    words[0] = 1 << 17
    rig = Rig([SamplingParams(temperature=1.0)], VOCAB)
    assert {rig.draw(logits, step, {0: words})[0][0] for step in range(50)} == {17}


def test_logprobs_are_of_the_raw_distribution_and_rank_the_chosen_token():
    params = [
        SamplingParams(temperature=0, logprobs=4, logit_bias={7: 100.0}),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logprobs=0),
    ]
    logits = fixed_logits(3)
    tokens, rows = Rig(params, VOCAB).draw(logits)
    assert rows is not None
    entries = rows.entries([4, 0])
    expected = torch.log_softmax(logits, dim=1)
    assert tokens[0] == 7
    assert [entry.token_id for entry in entries] == [tokens[0], tokens[2]]
    assert entries[0].logprob == pytest.approx(expected[0, 7].item(), abs=1e-5)
    assert entries[0].rank == int((logits[0] > logits[0, 7]).sum()) + 1
    order = logits[0].argsort(descending=True)[:4].tolist()
    assert [token for token, _ in entries[0].top] == order
    assert [value for _, value in entries[0].top] == pytest.approx(
        [expected[0, t].item() for t in order], abs=1e-5
    )
    assert entries[1].rank == 1
    assert entries[1].top == []


def test_sampling_does_not_change_the_logits_it_was_given():
    logits = fixed_logits(2)
    before = logits.clone()
    rig = Rig([PARAMS["penalties"], PARAMS["bias"]], VOCAB, banned=(2,))
    rig.draw(logits)
    assert torch.equal(logits, before)
