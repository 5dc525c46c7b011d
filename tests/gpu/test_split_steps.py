"""Mixed steps as several graphs against eager steps, token by token (runner/split.py)."""

from __future__ import annotations

import dataclasses
import random

import pytest

pytest.importorskip("triton")

from gpu_models import SHAPES, write_model
from leadline.engine import LLM, SamplingParams
from leadline.engine.core.plan import StepPlan

pytestmark = pytest.mark.gpu

SETTINGS = {
    "progress": False,
    "load_format": "dummy",
    "dtype": "float32",
    "attention_backend": "triton",
    "block_size": 16,
    "num_kv_blocks": 96,
    "max_concurrent_requests": 13,
    "max_num_batched_tokens": 256,
    "prefill_chunk": 64,
    "max_model_len": 1024,
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, LLM]:
    folder = str(write_model(tmp_path_factory.mktemp("tiny"), SHAPES["tiny"], "float32"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEADLINE_SPLIT_STEPS", "1")
        split = LLM(folder, **SETTINGS)
    return LLM(folder, enforce_eager=True, **SETTINGS), split


def test_costs_are_measured(engines: tuple[LLM, LLM]) -> None:
    runner = engines[1].core.runner
    costs = runner.splitter.costs
    assert list(costs.decode) == runner.graphs.sizes
    assert list(costs.chunk) == runner.graphs.prefill.lengths
    assert all(0 < cost < 1_000_000 for cost in [costs.launch, *costs.decode.values(), *costs.chunk.values()])
    # Graphs of a tiny model take the GPU less than their launches take the host.
    assert costs.of_decode(1) < costs.launch


def test_ragged_requests_get_the_tokens_of_eager_steps(
    engines: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staggered by their lengths, with preemption, shared prefixes, greedy and random rows and logprobs."""
    eager, split = engines
    splitter, pieces = split.core.runner.splitter, []
    monkeypatch.setattr(splitter, "costs", dataclasses.replace(splitter.costs, launch=1 << 40))
    original = splitter.split

    def counted(plan: StepPlan) -> list[StepPlan]:
        made = original(plan)
        pieces.append(len(made))
        return made

    monkeypatch.setattr(splitter, "split", counted)
    rng = random.Random(3)
    shared = [rng.randrange(12000) for _ in range(40)]
    prompts = [
        shared * (i % 2) + [rng.randrange(12000) for _ in range(rng.randint(2, 200))] for i in range(40)
    ]
    params = [
        SamplingParams(
            temperature=0.8 * (i % 3 == 1),
            seed=i,
            ignore_eos=True,
            max_tokens=rng.randint(1, 60),
            logprobs=i % 2,
        )
        for i in range(40)
    ]
    found, expected = (
        [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        for llm in (split, eager)
    )
    assert found == expected
    assert sum(count > 1 for count in pieces) > 20
