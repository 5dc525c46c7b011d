"""Two and more ranks against one, in each way that ranks can sum; and the death of a rank.

float32 and a small model with the same weights for all. Where there are too few GPUs the ranks share one.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

pytest.importorskip("triton")

from gpu_engine import compare
from gpu_models import SHAPES, write_model, write_weights
from leadline.engine import LLM, SamplingParams
from leadline.engine.errors import EngineDead
from leadline.engine.outputs import CompletionOutput

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU"),
]

WAYS = {
    "fabric": {},
    "two shots": {"LEADLINE_TP_TWO_SHOT_BYTES": "1"},
    "nccl": {"LEADLINE_TP_FABRIC": "0"},
    "eager": {},
    "four ranks": {},
    "four ranks, two shots": {"LEADLINE_TP_TWO_SHOT_BYTES": "1"},
}
SETTINGS = {
    "progress": False,
    "dtype": "float32",
    "attention_backend": "triton",
    "block_size": 16,
    "num_kv_blocks": 66,
    "max_concurrent_requests": 13,
    "max_num_batched_tokens": 256,
    "max_model_len": 1024,
}


LAST = max(torch.cuda.device_count(), 1) - 1


@pytest.fixture(scope="module", autouse=True)
def gpus_for_two() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.device_count() < 2:
            patch.setenv("LEADLINE_TP_SHARE_GPU", "1")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_model(tmp_path_factory.mktemp("tiny"), SHAPES["tiny"], "float32")
    write_weights(made, SHAPES["tiny"], "float32")
    return made


@pytest.fixture(scope="module")
def one(folder: Path) -> LLM:
    return LLM(str(folder), **SETTINGS)


@pytest.fixture(scope="module", params=WAYS)
def several(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    ranks = 4 if request.param.startswith("four") else 2
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.device_count() < ranks:
            patch.setenv("LEADLINE_TP_SHARE_GPU", "1")
        patch.setenv("LEADLINE_TP_CHECK", "1")
        patch.setenv("LEADLINE_TP_TIMEOUT", "60")
        for name, value in WAYS[request.param].items():
            patch.setenv(name, value)
        llm = LLM(str(folder), tensor_parallel=ranks, enforce_eager=request.param == "eager", **SETTINGS)
    assert (llm.core.runner.group.fabric is None) == (request.param == "nccl")
    assert (llm.core.runner.runner.graphs is None) == (request.param == "eager")
    yield llm
    llm.close()


def prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(12000) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def runs(llm: LLM, given: list[list[int]], params: list[SamplingParams]) -> list[CompletionOutput]:
    llm.reset_prefix_cache()
    return [output.outputs[0] for output in llm.generate(given, params, use_tqdm=False)]


def assert_equal_but_for_ties(found: list[CompletionOutput], expected: list[CompletionOutput]) -> None:
    """Sums over two ranks round otherwise than one long sum, and attention rounds to tf32 after that."""
    difference = compare(expected, found)
    assert difference["worst_nats"] < 0.01, difference
    assert difference["worst_gap"] < 0.01, difference
    assert difference["sequences_equal"] >= 0.9 * difference["sequences"], difference


def test_ragged_requests_get_the_tokens_of_one_gpu(one: LLM, several: LLM) -> None:
    """With preemption, in steps of 1 to 13 rows and in chunks."""
    given = prompts(30, 150, 1) + prompts(4, 700, 2)
    rng = random.Random(2)
    params = [
        SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=rng.randint(1, 80), logprobs=8)
        for _ in given
    ]
    before = several.core.stats().preemptions_total
    assert_equal_but_for_ties(runs(several, given, params), runs(one, given, params))
    assert several.core.stats().preemptions_total > before


def test_ranks_draw_the_same_tokens(one: LLM, several: LLM) -> None:
    """By the graph's kernels and by the eager sampler. LEADLINE_TP_CHECK compares every step."""
    given = prompts(20, 100, 3)
    kinds = [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.9, "top_k": 5, "min_p": 0.01}]
    params = [
        SamplingParams(seed=i, ignore_eos=True, max_tokens=20, **kinds[i % 3]) for i in range(len(given))
    ]
    first, again, single = (runs(llm, given, params) for llm in (several, several, one))
    assert [run.token_ids for run in first] == [run.token_ids for run in again]
    # A draw that lies on a boundary may fall the other way.
    same = [run.token_ids == other.token_ids for run, other in zip(first, single, strict=True)]
    assert sum(same) >= 17


def test_a_lone_prompt_gets_the_tokens_of_one_gpu(one: LLM, several: LLM) -> None:
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4, logprobs=8)]
    found, expected = [], []
    for count in (1, 2, 63, 64, 65, 200, 256, 300, 900):
        given = prompts(1, 1, count)[0] * count
        found += runs(several, [given], params)
        expected += runs(one, [given], params)
    assert_equal_but_for_ties(found, expected)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_in_a_step_is_an_error_soon(
    folder: Path, how: signal.Signals, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E24. Without the module's engines: one is ended here. Killed with NCCL, stopped with the fabric."""
    if how == signal.SIGKILL:
        monkeypatch.setenv("LEADLINE_TP_FABRIC", "0")
    monkeypatch.setenv("LEADLINE_TP_TIMEOUT", "20")
    llm = LLM(str(folder), tensor_parallel=2, **SETTINGS)
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=40)] * 8
    llm.generate(prompts(8, 40, 3), params, use_tqdm=False)  # kernels are compiled
    (worker,) = [psutil.Process(worker.process.pid) for worker in llm.core.runner.ranks.workers]
    began = []

    def strike() -> None:
        began.append(time.monotonic())
        worker.send_signal(how)

    threading.Timer(0.5, strike).start()
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=900)] * 8

    def generate() -> None:
        while True:
            llm.generate(prompts(8, 40, 3), params, use_tqdm=False)

    with pytest.raises(EngineDead, match=r"rank 1 (was killed by SIGKILL|is stopped)"):
        generate()
    assert time.monotonic() - began[0] < (5 if how == signal.SIGKILL else 30)
    assert not worker.is_running()
    llm.close()


LEADER = """
import sys
from leadline.engine import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel=2, progress=False, attention_backend="triton", num_kv_blocks=100,
          max_concurrent_requests=8, max_num_batched_tokens=256, max_model_len=1024)
params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=500)
llm.generate([[5, 6, 7]], params, use_tqdm=False)
print("ready", flush=True)
while True:
    llm.generate([[5, 6, 7]], params, use_tqdm=False)
"""


def test_ranks_of_a_killed_leader_leave_their_gpus(folder: Path) -> None:
    """E24, with two engines on the same GPUs: the other one goes on."""
    free = torch.cuda.mem_get_info(LAST)[0]
    command = [sys.executable, "-c", LEADER, str(folder)]
    leaders = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for leader in leaders:
            assert leader.stdout.readline() == b"ready\n"
        workers = [psutil.Process(leader.pid).children() for leader in leaders]
        assert [len(found) for found in workers] == [1, 1]
        os.kill(leaders[0].pid, signal.SIGKILL)
        assert not psutil.wait_procs(workers[0], timeout=10)[1]
        assert leaders[1].poll() is None
        assert workers[1][0].is_running()
    finally:
        for leader in leaders:
            leader.kill()
            leader.wait()
    assert not psutil.wait_procs(workers[1], timeout=10)[1]
    deadline = time.monotonic() + 10
    while torch.cuda.mem_get_info(LAST)[0] < free - (64 << 20) and time.monotonic() < deadline:
        time.sleep(0.1)  # the driver takes a moment to give memory back
    assert torch.cuda.mem_get_info(LAST)[0] >= free - (64 << 20)


def test_512_requests_of_1000_cached_tokens(folder: Path) -> None:
    """E19. All of them enter with one plan."""
    llm = LLM(
        str(folder),
        tensor_parallel=2,
        **{**SETTINGS, "num_kv_blocks": 2000, "max_concurrent_requests": 512, "max_num_batched_tokens": 8192}
        | {"max_model_len": 1100},
    )
    rng = random.Random(4)
    prefix = [rng.randrange(12000) for _ in range(992)]
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=3)
    llm.generate([[*prefix, 5]], greedy, use_tqdm=False)
    given = [[*prefix, *(rng.randrange(12000) for _ in range(9))] for _ in range(512)]
    outputs = llm.generate(given, greedy, use_tqdm=False)
    assert {output.num_cached_tokens for output in outputs} == {992}
    for index in (0, 77, 511):
        alone = llm.generate([given[index]], greedy, use_tqdm=False)[0]
        assert alone.outputs[0].token_ids == outputs[index].outputs[0].token_ids
    llm.close()


def expert_runs(folder: Path, dtype: str, given: list[list[int]]) -> list[list[CompletionOutput]]:
    """Greedy runs on one rank and on two: many requests, and a lone one, whose steps of one row take another
    way in 16 bits."""
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=30, logprobs=8)] * len(given)
    found = []
    for ranks in (1, 2):
        with LLM(str(folder), tensor_parallel=ranks, **SETTINGS | {"dtype": dtype}) as llm:
            found.append(runs(llm, given, params) + runs(llm, given[:1], params[:1]))
    return found


def test_experts_over_ranks_give_the_tokens_of_one_gpu(tmp_path: Path) -> None:
    folder = write_model(tmp_path, SHAPES["tiny-moe"], "float32")
    write_weights(folder, SHAPES["tiny-moe"], "float32")
    one, two = expert_runs(folder, "float32", prompts(20, 150, 5))
    assert_equal_but_for_ties(two, one)


def test_experts_over_ranks_in_16_bits_are_as_near_to_float32_as_on_one_gpu(tmp_path: Path) -> None:
    """In bfloat16 a router of random weights changes its choice by rounding alone, so one rank's tokens say
    nothing of another's. Each run is compared with float32 on its own history instead.

    Over two ranks the outputs of attention and of experts are rounded twice more before they are summed: four
    roundings more than the eight or so of a layer. Independent errors then grow by sqrt(12 / 8) = 1.22.
    """
    folder = write_model(tmp_path, SHAPES["tiny-moe"], "bfloat16")
    write_weights(folder, SHAPES["tiny-moe"], "bfloat16")
    given = prompts(20, 150, 5)
    found = expert_runs(folder, "bfloat16", given)
    means = []
    with LLM(str(folder), **SETTINGS) as exact:
        for outputs in found:
            errors = []
            for prompt, output in zip([*given, given[0]], outputs, strict=True):
                whole = exact.generate(
                    [prompt + output.token_ids],
                    SamplingParams(max_tokens=1, prompt_logprobs=0),
                    use_tqdm=False,
                )[0].prompt_logprobs
                assert whole is not None
                assert output.logprobs is not None
                truth = whole[len(prompt) - 1 :]
                errors += [abs(a.logprob - b.logprob) for a, b in zip(output.logprobs, truth, strict=True)]
            means.append(sum(errors) / len(errors))
    assert 0 < means[1] < 1.5 * means[0], means


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_fp8_over_ranks_is_as_near_to_16_bits_as_on_one_gpu(shape: str, tmp_path: Path) -> None:
    """Weights and cache; through graphs, eager ones and the layers of few rows."""
    folder = write_model(tmp_path, SHAPES[shape], "bfloat16")
    write_weights(folder, SHAPES[shape], "bfloat16")
    given = prompts(20, 150, 6)
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8, logprobs=8)] * len(given)
    plain, fp8 = SETTINGS | {"dtype": "bfloat16"}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    found = []
    for ranks, more in ((1, {}), (1, fp8), (2, fp8)):
        with LLM(str(folder), tensor_parallel=ranks, **plain, **more) as llm:
            found.append(runs(llm, given, params))
    one, two = (compare(found[0], other)["mean_nats"] for other in found[1:])
    assert 0 < two < 1.5 * one < 0.5


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sums_over_ranks_agree_with_float64(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = torch.cuda.device_count() < ranks
    if shared:
        monkeypatch.setenv("LEADLINE_TP_SHARE_GPU", "1")
    script = Path(__file__).parents[2] / "benchmarks" / "gpu_allreduce.py"
    replays = str(20 // ranks if shared else 20)
    done = subprocess.run(
        [sys.executable, str(script), "--check", "--tp", str(ranks), "--replays", replays],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "agree with float64" in done.stdout
    assert "agree to the bit" in done.stdout
