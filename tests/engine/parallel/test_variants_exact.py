"""Variants of the decoder through whole engines: the tokens of transformers, however the work is cut up.

Tiny random models with windows of no whole number of blocks; prompts around the window.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from exact_rig import Rig
from parallel_rig import ParallelRig
from tiny_checkpoints import build_reference, save_reference

from leadline.engine.hub.local import LocalModel
from leadline.engine.sampling_params import SamplingParams

NEW_TOKENS, WINDOW = 12, 24
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
SETTINGS = {"max_model_len": 128, "block_size": 16, "cpu_kv_bytes": 1 << 22}
CASES = {
    "every layer has a window": ("mistral", {"sliding_window": WINDOW}),
    "the last layers have one": (
        "qwen2",
        {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    ),
    "the layers without one do not rotate": ("exaone4", {"sliding_window": WINDOW}),
    "norms over all heads after attention": ("olmo3", {"sliding_window": WINDOW}),
    "Gemma 2": ("gemma2", {"sliding_window": WINDOW}),
    "Gemma 3": ("gemma3_text", {"sliding_window": WINDOW}),
    "neighbouring pairs, a part of a head": ("glm4", {}),
    "multipliers": ("granite", {}),
    "sigmoid router, groups, shared experts": ("glm4_moe", {}),
    "a gated MLP beside experts": ("qwen2_moe", {}),
    "queries that grow": ("ministral3", {}),
}
"""Name → family and its changes."""


def make_prompts() -> list[list[int]]:
    """Shorter than the window, as long, and longer; then prompts that share a prefix that ends around it."""
    rng = random.Random(6)

    def draw(count: int) -> list[int]:
        return [rng.randrange(3, 101) for _ in range(count)]

    prompts = [draw(length) for length in (1, WINDOW - 1, WINDOW, WINDOW + 1, 50, 90)]
    return prompts + [prompts[-1][:cut] + draw(3) for cut in (WINDOW - 1, WINDOW, 32, 33, 48, 49, 80)]


class Variant:
    """A model of one case, and what greedy transformers adds to each prompt."""

    def __init__(self, name: str, folder: Path) -> None:
        family, changes = CASES[name]
        reference = build_reference(family, seed=1, **changes)
        self.local = LocalModel(save_reference(reference, folder), "tiny", "1")
        self.prompts = make_prompts()
        self.tokens = [_greedy(reference, prompt) for prompt in self.prompts]


def _greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            best = model(torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
            assert best.values[0] - best.values[1] > 1e-4, "a near tie proves nothing: take another seed"
            ids.append(int(best.indices[0]))
    return ids[len(prompt) :]


@pytest.fixture(scope="module", params=CASES)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Variant:
    return Variant(request.param, tmp_path_factory.mktemp("variant"))


def run(ranks: ParallelRig, variant: Variant, size: int = 1, **settings: object) -> tuple[Rig, object]:
    rig, core = Rig(variant.local, None), ranks.core(size, variant.local, **{**SETTINGS, **settings})
    assert rig.run(core, variant.prompts, GREEDY, eos_token_ids=()) == variant.tokens
    return rig, core


def test_each_prompt_alone(variant, ranks):
    core = ranks.core(1, variant.local, **SETTINGS, prefix_caching=False)
    rig = Rig(variant.local, None)
    for prompt, expected in zip(variant.prompts, variant.tokens, strict=True):
        assert rig.run(core, [prompt], GREEDY, eos_token_ids=()) == [expected]
    assert len({tuple(tokens) for tokens in variant.tokens}) > 8, "answers vary"


@pytest.mark.parametrize("chunk", [None, 7])
def test_all_prompts_in_one_batch_whole_and_in_chunks(variant, ranks, chunk):
    run(ranks, variant, prefix_caching=False, prefill_chunk=chunk)


def test_prefix_hits_that_end_around_the_window(variant, ranks):
    rig, core = run(ranks, variant)
    assert rig.run(core, variant.prompts, GREEDY, eos_token_ids=()) == variant.tokens
    hits = [rig.outputs[str(i)].num_cached_tokens for i in range(len(variant.prompts))]
    assert hits == [(len(prompt) - 1) // 16 * 16 for prompt in variant.prompts]


def test_a_pool_so_small_that_sequences_are_preempted(variant, ranks):
    _, core = run(ranks, variant, num_kv_blocks=12)
    assert core.stats().preemptions_total > 0


def test_several_tokens_a_step_by_speculation(variant, ranks):
    run(ranks, variant, speculative_ngram=3)
