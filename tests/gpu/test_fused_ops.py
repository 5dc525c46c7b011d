"""The decoder's fused kernels against float64: fresh random inputs, every shape the models have and odd ones.

With TRITON_INTERPRET=1 they run, slowly, without a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from leadline.engine.models import ops, triton_ops
from leadline.engine.models.fp8 import quantize_rows

pytestmark = pytest.mark.gpu

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""‖out - expected‖ / ‖expected‖: one rounding to the dtype, and in-place sums one more."""
DTYPES = list(TOLERANCE)
ROWS = (1, 3, 130)


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert out.isfinite().all()
    error = (out.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[out.dtype], f"relative error {error:.2e}"


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 576, 1024, 4096, 5120])
@pytest.mark.parametrize("rows", ROWS)
def test_norms_match_float64(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual = normal(rows, width, dtype=dtype), normal(rows, width, dtype=dtype) * 3
    weight = normal(width, dtype=dtype)
    before = x.clone()
    close(triton_ops.rms_norm(x, weight, 1e-6), norm(x.double(), weight, 1e-6))
    assert torch.equal(x, before), "rms_norm must leave its input alone: it is the residual"

    total = x.double() + residual.double()
    rounded = (x.float() + residual.float()).to(dtype)
    out, summed = triton_ops.add_rms_norm(x, residual, weight, 1e-6)
    close(summed, total)
    close(out, norm(rounded.double(), weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [96, 3072, 12288])
@pytest.mark.parametrize("rows", ROWS)
def test_gated_activation_matches_float64(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = normal(rows, 2 * width, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    close(triton_ops.silu_and_mul(gate_up), torch.nn.functional.silu(gate) * up)
    close(triton_ops.gelu_and_mul(gate_up), torch.nn.functional.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_norms_may_be_wider_than_what_they_norm(dtype: torch.dtype) -> None:
    x, weight = normal(3, 640, dtype=dtype), 1 + normal(640, dtype=torch.float32) * 0.01
    close(triton_ops.rms_norm(x, weight, 1e-6), norm(x.double(), weight, 1e-6))
    residual = normal(3, 640, dtype=dtype)
    total = (x.float() + residual.float()).to(dtype).double()
    out, _ = triton_ops.add_rms_norm(x, residual, weight, 1e-6)
    close(out, norm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (9, 3, 64), (6, 2, 80), (4, 4, 96)])
@pytest.mark.parametrize("tokens", ROWS)
def test_rotary_heads_match_float64_and_fill_the_cache(
    tokens: int, heads: int, kv_heads: int, dim: int, written: bool, normed: bool, dtype: torch.dtype
) -> None:
    block_size, blocks = 16, 40
    qkv = normal(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = torch.rand(tokens, dim // 2, device=DEVICE) * 6.28
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(dtype).unsqueeze(1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(dtype).unsqueeze(1)
    norms = (normal(dim, dtype=dtype), normal(dim, dtype=dtype), 1e-6) if normed else None
    caches = [torch.full((blocks, block_size, kv_heads, dim), 7.0, device=DEVICE, dtype=dtype) for _ in "kv"]
    slots = torch.randperm(blocks * block_size, device=DEVICE)[:tokens]
    slots[1::3] = -1  # padding of a captured step

    wide = qkv.double().view(tokens, heads + 2 * kv_heads, dim)
    q, k, v = wide.split([heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q, k = norm(q, norms[0], norms[2]), norm(k, norms[1], norms[2])

    def rotate(x: torch.Tensor) -> torch.Tensor:
        return x * cos.double() + x.roll(dim // 2, dims=-1) * sin.double()

    target = (*caches, slots) if written else None
    found = triton_ops.rotary_heads(qkv.clone(), cos, sin, heads, kv_heads, norms, target)
    for out, expected in zip(found, (rotate(q), rotate(k), v), strict=True):
        assert out.shape == expected.shape
        close(out, expected)
    untouched = torch.ones(blocks * block_size, dtype=torch.bool, device=DEVICE)
    if written:
        live = slots >= 0
        untouched[slots[live]] = False
        for cache, rows in zip(caches, found[1:], strict=True):
            assert torch.equal(cache.flatten(0, 1)[slots[live]], rows[live])
    for cache in caches:
        assert (cache.flatten(0, 1)[untouched] == 7.0).all(), "a row that is nobody's was written"


@pytest.mark.skipif(DEVICE == "cpu", reason="programmatic dependent launch needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", ["plain", "norm", "norm, gated", "residual", "fp8, norm, gated", "fp8, residual"]
)
@pytest.mark.parametrize(
    ("width", "outs"), [(1024, 4096), (2048, 1024), (576, 1000), (3072, 1024), (12288, 4096), (4096, 6144)]
)
def test_one_row_products_match_float64(width: int, outs: int, kind: str, dtype: torch.dtype) -> None:
    from leadline.engine.models.triton_gemv import gemv

    x = normal(1, width, dtype=dtype)
    weight = normal(outs, width, dtype=dtype) * width**-0.5
    norm_weight, residual = normal(width, dtype=dtype), normal(1, outs, dtype=dtype)
    wide = x.double()
    if "norm" in kind:
        wide = norm(wide, norm_weight, 1e-6)
    scales = None
    expected = wide @ weight.double().t()
    if "fp8" in kind:
        weight, scales = quantize_rows(weight)
        expected = wide @ (weight.double() * scales.double()).t()
    if "residual" in kind:
        expected = expected + residual.double()
    if "gated" in kind:
        gate, up = expected.chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate) * up
    out = gemv(
        x,
        weight,
        scales,
        norm=(norm_weight, 1e-6) if "norm" in kind else None,
        gated="gated" in kind,
        residual=residual if "residual" in kind else None,
    )
    close(out, expected)
    assert (out is residual) == ("residual" in kind)


def test_cuda_gets_the_fused_table_and_the_cpu_the_reference() -> None:
    assert ops.select_ops(torch.device("cuda")).rotary_heads is triton_ops.rotary_heads
    assert ops.select_ops(torch.device("cpu")) is ops.TORCH_OPS
