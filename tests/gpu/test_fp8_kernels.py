"""FP8 on a GPU: rounding, products and the FP8 cache against the plain reference in float64."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from gpu_models import SHAPES, write_model
from leadline.engine import LLM, SamplingParams
from leadline.engine.errors import ConfigError
from leadline.engine.models.fp8 import FP8, has_fp8, quantize_rows, scaled_product

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _fp8_gpu() -> None:
    if not has_fp8(CUDA):
        pytest.skip("no FP8 tensor cores")


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 1024), (65, 3072), (7, 12288)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_rounds_as_the_reference_does(rows, width, dtype):
    x = torch.randn(rows, width, device=CUDA, dtype=dtype) * torch.logspace(-4, 3, rows, device=CUDA)[:, None]
    x = x.to(dtype)
    x[0, 0] = 0.0
    values, scale = quantize_rows(x)
    expected, expected_scale = quantize_rows(x.cpu())
    assert torch.allclose(scale.cpu(), expected_scale, rtol=1e-6, atol=0)
    # The GPU divides to within two units in the last place, so a quotient at a tie may round the other way;
    # in bfloat16, whose mantissas are short, one in a thousand does.
    same = values.cpu().view(torch.uint8) == expected.view(torch.uint8)
    assert float(same.float().mean()) > 0.995
    step = (expected.float().abs() * 2.0**-3).clamp(min=2.0**-9)
    assert bool(((values.cpu().float() - expected.float()).abs() <= step).all())


def test_strided_rows_and_rows_of_zeros():
    x = torch.randn(5, 256, device=CUDA, dtype=torch.bfloat16)[:, :128]
    x[2] = 0
    values, scale = quantize_rows(x)
    assert torch.equal(values.float()[2], torch.zeros(128, device=CUDA))
    assert float((values.float() * scale - x.float()).abs().max()) <= float(x.float().abs().max()) * 2.0**-4


@pytest.mark.parametrize("rows", [1, 2, 17, 64, 300])
@pytest.mark.parametrize(("width", "out"), [(1024, 4096), (3072, 1024), (4096, 6144)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_rounded_factors(rows, width, out, bias):
    x = torch.randn(rows, width, device=CUDA, dtype=torch.bfloat16)
    weight, scale = quantize_rows(torch.randn(out, width, device=CUDA, dtype=torch.bfloat16) * 0.02)
    added = torch.randn(out, device=CUDA, dtype=torch.bfloat16) if bias else None
    y = scaled_product(x, weight, scale, added)
    values, scales = quantize_rows(x)
    exact = (values.double() * scales.double()) @ (weight.double() * scale.double()).t()
    if added is not None:
        exact += added.double()
    # Fast accumulation keeps some 14 bits of each partial sum; the result is rounded to bfloat16.
    assert float((y.double() - exact).abs().max()) < 0.02 * float(exact.abs().max())
    assert float((y.double() - exact).square().mean().sqrt()) < 0.004 * float(exact.square().mean().sqrt())


def engine(folder: Path, **settings) -> LLM:
    settings = {"attention_backend": "triton", "max_model_len": 1024, "num_kv_blocks": 64, **settings}
    return LLM(
        str(folder),
        progress=False,
        load_format="dummy",
        max_concurrent_requests=8,
        max_num_batched_tokens=512,
        **settings,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), SHAPES["tiny"], "bfloat16")


def compare(left: LLM, right: LLM) -> tuple[int, list[float]]:
    """Tokens compared, and differences of log-probability of the same token after the same history."""
    rng = random.Random(3)
    prompts = [[rng.randrange(12000) for _ in range(length)] for length in (1, 17, 64, 65, 130, 200)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=24, logprobs=5)
    differences = []
    for mine, theirs in zip(
        left.generate(prompts, params, use_tqdm=False),
        right.generate(prompts, params, use_tqdm=False),
        strict=True,
    ):
        for a, b in zip(mine.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
            seen = dict([*b.top, (b.token_id, b.logprob)])
            if a.token_id in seen:
                differences.append(abs(a.logprob - seen[a.token_id]))
            if a.token_id != b.token_id:
                break
    return len(differences), differences


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_triton_reads_an_fp8_cache_as_the_torch_backend_does(tiny, eager, block_size):
    ours = engine(tiny, kv_cache_dtype="fp8", block_size=block_size, enforce_eager=eager)
    theirs = engine(
        tiny, kv_cache_dtype="fp8", block_size=block_size, enforce_eager=True, attention_backend="torch"
    )
    assert ours.core.runner.kv_cache[0][0].dtype == FP8
    count, differences = compare(ours, theirs)
    assert count > 60
    assert sum(differences) / count < 0.05
    assert max(differences) < 0.5


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_fp8_weights_stay_near_16_bits(tiny, eager):
    count, differences = compare(
        engine(tiny, quantization="fp8", enforce_eager=eager), engine(tiny, enforce_eager=eager)
    )
    assert count > 20
    assert sum(differences) / count < 0.5


def test_auto_chooses_a_backend_that_reads_the_cache(tiny):
    llm = engine(tiny, kv_cache_dtype="fp8", attention_backend="auto")
    assert llm.core.runner.backend.name == "triton"
    with pytest.raises(ConfigError, match="bfloat16"):
        engine(tiny, quantization="fp8", dtype="float32")
