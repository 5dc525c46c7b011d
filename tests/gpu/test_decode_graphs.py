"""Decode graphs against eager steps, token by token, on a small float32 model with random weights.

float32, because there a token differs only where something is wrong: a batch of another (padded) size rounds
otherwise, and in bfloat16 that alone decides near-ties.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from gpu_models import SHAPES, write_model
from leadline.engine import LLM, SamplingParams
from leadline.engine.runner.graphs.decode import graph_sizes

pytestmark = pytest.mark.gpu

ROWS = 13


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        shape: write_model(tmp_path_factory.mktemp(shape), SHAPES[shape], "float32")
        for shape in ("tiny", "tiny-moe")
    }


@pytest.fixture(scope="module", params=[("tiny", 16), ("tiny", 64), ("tiny-moe", 64)])
def pair(request: pytest.FixtureRequest, folders: dict[str, Path]) -> tuple[LLM, LLM]:
    """An eager engine and one with graphs, with so few blocks that long batches preempt."""
    shape, size = request.param
    engines = [
        LLM(
            str(folders[shape]),
            progress=False,
            load_format="dummy",
            dtype="float32",
            attention_backend="triton",
            block_size=size,
            num_kv_blocks=1536 // size,
            max_concurrent_requests=ROWS,
            max_num_batched_tokens=256,
            max_model_len=1024,
            enforce_eager=eager,
        )
        for eager in (True, False)
    ]
    assert engines[0].core.runner.graphs is None
    assert engines[1].core.runner.graphs is not None
    return engines[0], engines[1]


def prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(12000) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def tokens(llm: LLM, given: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    llm.reset_prefix_cache()
    outputs = llm.generate(given, params, use_tqdm=False)
    llm.core.check_integrity()
    return [output.outputs[0].token_ids for output in outputs]


def replays(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each decode graph step from here on."""
    graphs, seen = llm.core.runner.graphs, []
    inner = graphs._run_decode
    monkeypatch.setattr(graphs, "_run_decode", lambda plan: (seen.append(len(plan.rows)), inner(plan))[1])
    return seen


def test_ragged_requests_that_come_and_go_get_the_tokens_of_eager_steps(
    pair: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = prompts(40, 150, 1)
    rng = random.Random(2)
    params = [
        SamplingParams(temperature=(0.0, 0.8)[i % 2], seed=i, ignore_eos=True, max_tokens=rng.randint(1, 120))
        for i in range(len(given))
    ]
    seen = replays(pair[1], monkeypatch)
    preempted = [llm.core.stats().preemptions_total for llm in pair]
    expected, found = (tokens(llm, given, params) for llm in pair)
    assert found == expected
    for llm, before in zip(pair, preempted, strict=True):
        assert llm.core.stats().preemptions_total > before, "the pool was meant to be too small"
    assert len(seen) > 50
    assert len(set(seen)) > 3


def test_every_batch_size_runs(pair: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = replays(pair[1], monkeypatch)
    for count in range(1, ROWS + 1):
        given = prompts(count, 12, count)
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=6)] * count
        expected, found = (tokens(llm, given, params) for llm in pair)
        assert found == expected, f"{count} rows"
    assert set(seen) == set(range(1, ROWS + 1))


def test_rows_that_need_the_eager_sampler_keep_their_meaning_in_a_graph_step(pair: tuple[LLM, LLM]) -> None:
    given = prompts(10, 40, 3)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 0.9, "top_k": 5},
        {"temperature": 0.9, "top_p": 0.7},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.7, "frequency_penalty": 0.5, "min_p": 0.01},
        {"temperature": 0.0, "logit_bias": {17: 50.0}},
        {"temperature": 0.0, "logprobs": 3},
    ]
    params = [
        SamplingParams(seed=i, ignore_eos=True, max_tokens=30 + i, **kinds[i % len(kinds)])
        for i in range(len(given))
    ]
    expected, found = (tokens(llm, given, params) for llm in pair)
    assert found == expected
    assert set(found[6]) == {17}


def test_a_prompt_whose_prefix_is_cached_starts_in_a_graph_step(
    pair: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its one token to compute is known on the host: the step takes it from there, not from the slot."""
    size = pair[1].config.block_size
    prompt = prompts(1, 1, 5)[0] * (2 * size + 1)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=5)
    results = []
    for llm in pair:
        llm.reset_prefix_cache()
        seen = replays(llm, monkeypatch) if llm is pair[1] else []
        first = llm.generate([prompt], params, use_tqdm=False)[0]
        before = len(seen)
        again = llm.generate([prompt], params, use_tqdm=False)[0]
        assert again.num_cached_tokens == 2 * size
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        results.append(first.outputs[0].token_ids)
        if llm is pair[1]:
            assert len(seen) - before >= 5, "the first token came from an eager step"
    assert results[0] == results[1]


def test_lone_prompts_of_any_length_get_the_tokens_of_eager_steps(
    pair: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, in several chunks, after a cached prefix, drawn, greedy, and with a top-k."""
    prefill, lengths = pair[1].core.runner.graphs.prefill, []
    inner = prefill.replay
    monkeypatch.setattr(prefill, "replay", lambda plan: (lengths.append(plan.rows[0].count), inner(plan))[1])
    rng = random.Random(7)
    stem = [rng.randrange(12000) for _ in range(150)]
    for llm in pair:
        llm.reset_prefix_cache()
    for i, count in enumerate([2, 3, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 400, 700]):
        prompt = [rng.randrange(12000) for _ in range(count)]
        given = stem + prompt if i % 3 == 0 else prompt
        sampling = ({"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.9, "top_k": 7})[i % 3]
        params = SamplingParams(seed=i, ignore_eos=True, max_tokens=3, **sampling)
        expected, found = (
            llm.generate([given], params, use_tqdm=False)[0].outputs[0].token_ids for llm in pair
        )
        assert found == expected, f"{count} tokens"
    assert len(lengths) > 17, "long prompts come in chunks of at most 256 tokens"
    assert max(lengths) <= 256


def test_the_report_states_graphs_time_and_memory(pair: tuple[LLM, LLM]) -> None:
    report = pair[1].core.runner.graph_report
    assert report.graphs == len(graph_sizes(ROWS))
    assert report.prefill_graphs == len(pair[1].core.runner.graphs.prefill.lengths) > 0
    assert report.seconds > 0
    assert 0 <= report.bytes < 1 << 30


@pytest.mark.parametrize("limit", [1, 2, 3, 8, 13, 64, 100, 256, 300, 1000])
def test_sizes_cover_every_batch_with_little_padding(limit: int) -> None:
    sizes = graph_sizes(limit)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == limit
    for rows in range(1, limit + 1):
        padding = min(size for size in sizes if size >= rows) - rows
        assert padding < max(8, min(rows / 2, 64))


def test_the_pool_leaves_room_for_the_graphs(folders: dict[str, Path]) -> None:
    free = torch.cuda.mem_get_info()[0]
    llm = LLM(
        str(folders["tiny"]),
        progress=False,
        load_format="dummy",
        dtype="bfloat16",
        attention_backend="triton",
        gpu_memory_utilization=0.3,
        max_concurrent_requests=64,
        max_model_len=1024,
    )
    total = torch.cuda.mem_get_info()[1]
    assert free - torch.cuda.mem_get_info()[0] <= 0.31 * total
    assert llm.core.runner.graph_report is not None
