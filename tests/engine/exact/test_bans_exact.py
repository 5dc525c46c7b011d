"""Bad words and allowed tokens on real weights: the same tokens alone and in a batch, with drafts, under
preemption, and behind output of another pod."""

from __future__ import annotations

import pytest

from leadline.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.timeout(600)
NEW = 24
"""Tokens of each answer."""
ON = {"speculative_ngram": 4, "speculative_match": 2, "speculative_max_batch": 64}


@pytest.fixture(scope="module")
def rig(shallow_rig):
    return shallow_rig


@pytest.fixture(scope="module")
def copying(tokenizer) -> list[list[int]]:
    """Prompts whose answers repeat, so that they draft."""
    texts = [
        "red, green, blue, red, green, blue, red, green, blue, red,",
        "for i in range(10):\n    print(i)\nfor i in range(20):\n    print(i)\nfor i in range(30):\n",
        "A rose is a rose is a rose is a",
        "Alpha one, beta two, gamma three, delta four. Say it again: Alpha one, beta two,",
    ]
    return [tokenizer.encode(text) for text in texts]


@pytest.fixture(scope="module")
def banned(rig, copying) -> list[SamplingParams]:
    """Of each prompt what its free answer says: a pair and a triple of tokens, one token, or the tokens that
    it may have."""
    plain = SamplingParams(temperature=0, max_tokens=NEW)
    free = rig.run(rig.core(prefix_caching=False), copying, plain, eos_token_ids=())
    common = {"max_tokens": NEW, "temperature": 0.7}
    return [
        SamplingParams(**common, bad_words=(tuple(free[0][2:4]), tuple(free[0][6:9]))),
        SamplingParams(max_tokens=NEW, temperature=0.0, bad_words=((free[1][1],), (free[1][4],))),
        SamplingParams(**common, allowed_token_ids=tuple({*free[2], *free[0]})),
        SamplingParams(
            max_tokens=NEW,
            temperature=0.0,
            allowed_token_ids=tuple({*free[3]}),
            bad_words=(tuple(free[3][3:5]),),
        ),
    ]


@pytest.fixture(scope="module")
def alone(rig, copying, banned) -> list[list[int]]:
    core = rig.core(prefix_caching=False, overlap=False)
    found = [
        rig.run(core, [prompt], params, seeds=[i], eos_token_ids=())[0]
        for i, (prompt, params) in enumerate(zip(copying, banned, strict=True))
    ]
    for tokens, params in zip(found, banned, strict=True):
        text = ",".join(map(str, ["", *tokens, ""]))
        for word in params.bad_words:
            assert ",".join(map(str, ["", *word, ""])) not in text
        assert params.allowed_token_ids is None or set(tokens) <= set(params.allowed_token_ids)
    return found


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_a_batch_with_drafts_gets_the_same_tokens(rig, copying, banned, alone, overlap):
    core = rig.core(block_size=16, prefill_chunk=11, overlap=overlap, **ON)
    plain = SamplingParams(temperature=0, max_tokens=NEW)
    got = rig.run(core, copying + copying, [*banned, *[plain] * 4], eos_token_ids=())
    assert got[:4] == alone
    assert core.stats().accepted_tokens_total > 0


def test_preemption_changes_no_token(rig, copying, banned, alone):
    need = max(-(-(len(prompt) + NEW) // 16) for prompt in copying)
    core = rig.core(block_size=16, num_kv_blocks=need + 3, overlap=True, **ON)
    assert rig.run(core, copying, banned, eos_token_ids=()) == alone
    assert core.stats().preemptions_total > 0


@pytest.mark.parametrize("resumed", [1, 3, 13])
def test_another_pod_goes_on_with_the_same_tokens(rig, copying, banned, alone, resumed):
    """A bad word may have begun in the output of the first."""
    core = rig.core(overlap=True)
    prompts = [prompt + tokens[:resumed] for prompt, tokens in zip(copying, alone, strict=True)]
    got = rig.run(core, prompts, banned, eos_token_ids=(), num_resumed=resumed)
    assert got == [tokens[resumed:] for tokens in alone]
