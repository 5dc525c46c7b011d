"""Steps never wait for the GPU but for the tokens of a step that has ended: torch raises where they would."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from gpu_models import SHAPES, write_model
from leadline.engine import LLM, SamplingParams

pytestmark = pytest.mark.gpu

KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {7: 2.0}},
    {"temperature": 0.0, "logprobs": 5, "min_tokens": 4},
    {"temperature": 0.0, "allowed_token_ids": tuple(range(100, 900)), "bad_words": ((150, 151),)},
    {"temperature": 0.8, "bad_words": ((5,), (7, 9), (1, 2, 3))},
]


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module", params=["graphs", "eager"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = write_model(tmp_path_factory.mktemp("tiny"), SHAPES["tiny"], "bfloat16")
    made = LLM(
        str(folder),
        progress=False,
        load_format="dummy",
        num_kv_blocks=200,
        max_concurrent_requests=24,
        max_num_batched_tokens=256,
        max_model_len=1024,
        enforce_eager=request.param == "eager",
    )
    assert (made.core.runner.graphs is None) == (request.param == "eager")
    return made


def run(llm: LLM, kinds: list[dict], seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(12000) for _ in range(rng.randint(1, 400))] for _ in range(24)]
    params = [
        SamplingParams(seed=i, ignore_eos=True, max_tokens=rng.randint(5, 60), **kinds[i % len(kinds)])
        for i in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [p.max_tokens for p in params]


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_one_kind_of_requests(llm: LLM, kind: int, waiting_is_an_error: None) -> None:
    run(llm, [KINDS[kind]], kind)


def test_all_kinds_together(llm: LLM, waiting_is_an_error: None) -> None:
    run(llm, KINDS, 9)


def test_waiting_is_seen(waiting_is_an_error: None) -> None:
    with pytest.raises(RuntimeError, match="synchronizing"):
        torch.zeros(1, device="cuda").item()
