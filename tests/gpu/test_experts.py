"""Experts: the kernels against float64, captured ones, and a whole model against the CPU's."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from gpu_engine import compare
from gpu_models import SHAPES, write_model, write_weights
from leadline.engine import LLM, SamplingParams
from leadline.engine.models import ops
from leadline.engine.models.fp8 import quantize_rows
from leadline.engine.models.triton_experts import experts
from leadline.engine.models.triton_experts_one import experts_of_one

pytestmark = pytest.mark.gpu

SIZES = {"tiny": (5, 2, 64, 40), "Mixtral": (8, 2, 1024, 512), "Qwen3": (128, 8, 512, 192)}
"""Experts, of which a token gets, hidden, inner. Columns that no tile divides among them."""


def layer(name: str, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Router, gate_up, down. The router's logits are the first columns of x, so that rounding moves none."""
    count, top, hidden, inner = SIZES[name]
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        value = torch.randn(shape, device="cuda", generator=generator) * shape[-1] ** -0.5
        return value.to(dtype)

    router = torch.eye(count, hidden, device="cuda", dtype=dtype)
    return router, normal(count, 2 * inner, hidden), normal(count, hidden, inner), top


def tokens(name: str, rows: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """No two logits of a row are equal."""
    count, _, hidden, _ = SIZES[name]
    generator = torch.Generator("cuda").manual_seed(1000 + seed)
    x = torch.randn((rows, hidden), device="cuda", generator=generator)
    x[:, :count] = torch.rand((rows, count), device="cuda", generator=generator).argsort() / 32.0
    return x.to(dtype)


def expected(x: torch.Tensor, *weights: torch.Tensor, top: int, renormalize: bool) -> torch.Tensor:
    return ops.experts(x.double(), *(weight.double() for weight in weights), top, renormalize)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 17, 64, 300, 3000])
@pytest.mark.parametrize("name", SIZES)
def test_the_kernels_agree_with_float64(name: str, rows: int, dtype: torch.dtype) -> None:
    *weights, top = layer(name, dtype, rows)
    x = tokens(name, rows, dtype, rows)
    for renormalize in (False, True):
        wanted = expected(x, *weights, top=top, renormalize=renormalize)
        found = experts(x, *weights, top, renormalize)
        error = float((found.double() - wanted).norm() / wanted.norm())
        assert error < {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype]
        out = torch.full_like(x, torch.nan)
        assert experts(x, *weights, top, renormalize, out) is out
        assert torch.equal(out, found)


@pytest.mark.parametrize("rows", [1, 40, 700])
@pytest.mark.parametrize("name", SIZES)
def test_experts_in_fp8_are_those_of_the_rounded_weights(name: str, rows: int) -> None:
    router, gate_up, down, top = layer(name, torch.bfloat16, rows)
    x = tokens(name, rows, torch.bfloat16, rows)
    values, scales, rounded = [], [], []
    for matrices in (gate_up, down):
        value, scale = quantize_rows(matrices.flatten(0, 1))
        values.append(value.view(matrices.shape))
        scales.append(scale.view(matrices.shape[:2]))
        rounded.append((value.double() * scale).view(matrices.shape))
    wanted = expected(x, router, *rounded, top=top, renormalize=True)
    found = experts(x, router, *values, top, True, None, tuple(scales))
    assert float((found.double() - wanted).norm() / wanted.norm()) < 6e-3
    reference = ops.experts(x, router, *values, top, True, None, tuple(scales))
    assert float((reference.double() - wanted).norm() / wanted.norm()) < 1.2e-2


def of_one(residual: torch.Tensor, weights: list[torch.Tensor], top: int, renormalize: bool) -> torch.Tensor:
    """What one token adds, in float64 but for the rounding of the router's logits."""
    router, gate_up, down = (weight.double() for weight in weights)
    x = residual.double()
    x = x * torch.rsqrt(x.square().mean() + 1e-6)
    share, chosen = (x @ router.T).to(residual.dtype).double().softmax(-1).topk(top)
    if renormalize:
        share = share / share.sum()
    total = torch.zeros_like(x)
    for expert, weight in zip(chosen[0], share[0], strict=True):
        gate, up = (gate_up[expert] @ x[0]).chunk(2)
        total += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    return total


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SIZES)
def test_one_token_by_matrix_vector_products(name: str, dtype: torch.dtype, fp8: bool) -> None:
    *weights, top = layer(name, dtype, 8)
    residual = tokens(name, 1, dtype, 9)
    norm = (torch.ones(residual.shape[1], dtype=dtype, device="cuda"), 1e-6)
    scales, rounded, given = None, weights, weights
    if fp8:
        pairs = [quantize_rows(matrices.flatten(0, 1)) for matrices in weights[1:]]
        shapes = [matrices.shape for matrices in weights[1:]]
        given = [weights[0], *(v.view(shape) for (v, _), shape in zip(pairs, shapes, strict=True))]
        scales = tuple(s.view(shape[:2]) for (_, s), shape in zip(pairs, shapes, strict=True))
        rounded = [weights[0], *(v.double() * s[..., None] for v, s in zip(given[1:], scales, strict=True))]
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for renormalize in (False, True):
        wanted = of_one(residual, rounded, top, renormalize)
        out = torch.full_like(residual, torch.nan)
        experts_of_one(residual, norm, *given, top, renormalize, scales, out)
        assert float((out.double() - wanted).norm() / wanted.norm()) < tolerance
        added = residual.clone()
        experts_of_one(added, norm, *given, top, renormalize, scales, None)
        torch.testing.assert_close(added, residual + out, atol=tolerance, rtol=tolerance)


def test_all_tokens_to_the_same_experts_and_none_to_most() -> None:
    *weights, top = layer("Qwen3", torch.bfloat16, 3)
    x = tokens("Qwen3", 1, torch.bfloat16, 4).repeat(500, 1)
    found = experts(x, *weights, top, True)
    assert torch.equal(found, found[:1].expand_as(found))
    wanted = expected(x[:1], *weights, top=top, renormalize=True)
    assert float((found[:1].double() - wanted).norm() / wanted.norm()) < 6e-3


@pytest.mark.parametrize("rows", [1, 40, 700])
@pytest.mark.parametrize("name", SIZES)
def test_experts_that_were_chosen_elsewhere(name: str, rows: int) -> None:
    """As routers by sigmoids choose them; also in a captured graph."""
    router, gate_up, down, top = layer(name, torch.bfloat16, rows)
    x = tokens(name, rows, torch.bfloat16, rows)
    generator = torch.Generator("cuda").manual_seed(rows)
    scores = torch.rand((rows, len(router)), generator=generator, device="cuda")
    weights, chosen = scores.topk(top, dim=-1)
    wanted = ops.experts(x, router, gate_up, down, top, True, None, None, (chosen, weights))
    found = experts(x, router, gate_up, down, top, True, None, None, (chosen, weights))
    assert float((found.double() - wanted.double()).norm() / wanted.double().norm()) < 1.2e-2
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(x, router, gate_up, down, top, True, None, None, (chosen, weights))
    chosen.copy_(chosen.flip(0))
    graph.replay()
    assert torch.equal(out, experts(x, router, gate_up, down, top, True, None, None, (chosen, weights)))


def test_a_captured_call_routes_whatever_comes() -> None:
    *weights, top = layer("Qwen3", torch.bfloat16, 5)
    x = tokens("Qwen3", 48, torch.bfloat16, 6)
    experts(x, *weights, top, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(x, *weights, top, True)
    for seed in range(5):
        x.copy_(tokens("Qwen3", 48, torch.bfloat16, 7 + seed))
        graph.replay()
        assert torch.equal(out, experts(x.clone(), *weights, top, True))


def test_a_model_gives_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    folder = write_model(tmp_path, SHAPES["tiny-moe"], "float32")
    write_weights(folder, SHAPES["tiny-moe"], "float32")
    rng = random.Random(1)
    given = [[rng.randrange(12000) for _ in range(rng.randint(1, 200))] for _ in range(12)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=24, logprobs=8)
    found = {}
    for device in ("cpu", "cuda"):
        with LLM(str(folder), device=device, dtype="float32", progress=False, max_model_len=512) as llm:
            found[device] = [o.outputs[0] for o in llm.generate(given, params, use_tqdm=False)]
    difference = compare(found["cpu"], found["cuda"])
    assert difference["worst_nats"] < 0.01, difference
    assert difference["worst_gap"] < 0.01, difference
    assert difference["sequences_equal"] >= 11, difference
