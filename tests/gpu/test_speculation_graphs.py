"""Speculation through decode graphs: a drafting row is as many rows of one slot, and no token changes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("triton")

from gpu_models import SHAPES, write_model
from leadline.engine import LLM, SamplingParams

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """float32: a token differs only where something is wrong."""
    return write_model(tmp_path_factory.mktemp("tiny"), SHAPES["tiny"], "float32")


def engine(folder: Path, **settings) -> LLM:
    return LLM(
        str(folder),
        progress=False,
        load_format="dummy",
        dtype="float32",
        attention_backend="triton",
        max_concurrent_requests=24,
        max_num_batched_tokens=256,
        max_model_len=1024,
        **settings,
    )


class Oracle:
    """Drafts what is known to come, and something else at every `period`-th position (0: never)."""

    def __init__(self, whole: dict[tuple[int, ...], list[int]], request, period: int) -> None:
        self.prompt, self.period = tuple(request.prompt_token_ids), period
        self.whole = whole[self.prompt]

    def propose(self, tokens, limit: int) -> list[int]:
        done = len(tokens) - len(self.prompt)
        draft = self.whole[done : done + limit]
        wrong = self.period and [len(tokens) + i for i in range(len(draft))]
        return [(t + 1) % 12000 if wrong and wrong[i] % self.period == 0 else t for i, t in enumerate(draft)]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_those_without_drafts(folder, eager, block_size, temperature):
    rng = random.Random(4)
    prompts = [[rng.randrange(12000) for _ in range(length)] for length in (1, 15, 16, 17, 63, 64, 65, 200)]
    params = [
        SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=70, seed=i)
        for i in range(len(prompts))
    ]
    blocks = {"block_size": block_size, "num_kv_blocks": 2048 // block_size}
    plain = engine(folder, enforce_eager=eager, **blocks)
    expected = [out.outputs[0].token_ids for out in plain.generate(prompts, params, use_tqdm=False)]
    whole = {tuple(prompt): tokens for prompt, tokens in zip(prompts, expected, strict=True)}
    drafting = engine(folder, enforce_eager=eager, speculative_ngram=5, speculative_max_batch=24, **blocks)
    core = drafting.core
    for period in (0, 3):
        core.scheduler._speculation._make_drafter = lambda request, period=period: Oracle(
            whole, request, period
        )
        drafting.reset_prefix_cache()
        outputs = drafting.generate(prompts, params, use_tqdm=False)
        assert [out.outputs[0].token_ids for out in outputs] == expected
        core.check_integrity()
    stats = core.stats()
    assert stats.accepted_tokens_total > 300
    assert stats.accepted_tokens_total < stats.drafted_tokens_total


def test_prompt_lookup_on_repeating_prompts(folder):
    rng = random.Random(5)
    prompts = [[rng.randrange(12000) for _ in range(20)] * 4 for _ in range(6)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=100)
    plain = engine(folder, num_kv_blocks=64)
    expected = [out.outputs[0].token_ids for out in plain.generate(prompts, params, use_tqdm=False)]
    drafting = engine(
        folder, speculative_ngram=4, speculative_match=2, speculative_max_batch=24, num_kv_blocks=64
    )
    outputs = drafting.generate(prompts, params, use_tqdm=False)
    assert [out.outputs[0].token_ids for out in outputs] == expected
    assert drafting.core.stats().drafted_tokens_total > 0
