"""Steps of few rows through the fused layers against the same steps through the plain ones, and the products
against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from gpu_models import SHAPES, write_model
from leadline.engine import LLM, SamplingParams
from leadline.engine.core.plan import NewSeq, StepPlan, StepRow
from leadline.engine.models.fp8 import quantize_rows
from leadline.engine.models.skinny_shapes import Shape
from leadline.engine.models.triton_skinny import Workspace, skinny

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33, 64])
@pytest.mark.parametrize("shape", ["tiny", "Qwen3-0.6B"])
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_step_of_few_rows_gives_the_logits_of_the_plain_layers(
    tmp_path: Path, shape: str, rows: int, quantization: str | None
) -> None:
    """In bfloat16 the two round differently: a few parts in a thousand a layer, not more. With FP8 weights
    the plain layers round activations to FP8 too, which is more."""
    write_model(tmp_path, SHAPES[shape], "bfloat16")
    llm = LLM(
        str(tmp_path),
        progress=False,
        load_format="dummy",
        attention_backend="triton",
        num_kv_blocks=4 * rows + 1,
        max_concurrent_requests=64,
        max_num_batched_tokens=16384,
        max_model_len=256,
        enforce_eager=True,
        quantization=quantization,
    )
    runner = llm.core.runner
    few = runner.model.few_rows
    assert few is not None
    sampling = SamplingParams(temperature=0.0)
    fill, step = StepPlan(0), StepPlan(1)
    for slot in range(rows):
        count = 3 + (61 * slot) % 190
        tokens = [(7 * i + slot) % 1000 for i in range(count + 1)]
        blocks = list(range(1 + 4 * slot, 5 + 4 * slot))
        fill.entered.append(NewSeq(slot, slot, tokens, count + 1, sampling, 0, blocks))
        fill.rows.append(StepRow(slot, 0, count, False))
        step.rows.append(StepRow(slot, count, 1, True))
    runner.launch(fill).wait()
    results = []
    with torch.inference_mode():
        for way in (None, few, few):
            runner.model.few_rows = way
            _, logits = runner.compute(runner.inputs.build(step))
            cache = torch.stack([torch.stack(pair) for pair in runner.kv_cache])
            results.append((logits.double(), cache.double()))
    (plain, plain_kv), (fused, fused_kv), (again, _) = results
    assert torch.equal(fused, again), "the same step twice gave different bits"
    bound = 0.03 if quantization is None else 0.25
    assert (fused - plain).norm() / plain.norm() < bound
    assert (fused_kv - plain_kv).norm() / plain_kv.norm() < bound
    assert plain_kv[:, :, 1:].abs().sum() > 0
    assert not fused_kv[:, :, 0].any(), "a block that is nobody's was written"


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    error = (out.double() - expected).norm() / expected.norm()
    assert error < 8e-3, f"relative error {error:.2e}"


@pytest.mark.parametrize("rows", [2, 5, 16, 17, 32, 50, 64])
@pytest.mark.parametrize(
    ("hidden", "width", "outs"), [(1024, 2048, 4096), (576, 1536, 960), (4096, 12288, 6144), (64, 128, 256)]
)
def test_products_and_norms_match_float64(rows: int, hidden: int, width: int, outs: int) -> None:
    """A residual product, and both kinds of products that read the norm of its result; those with weights in
    FP8, too."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=CUDA).bfloat16()

    space = Workspace(hidden, torch.bfloat16, CUDA)
    for splits in {Shape.of(hidden, width, gated=False).splits, 1, 2}:
        x, residual, norm = normal(rows, width), normal(rows, hidden) * 2, normal(hidden)
        weight = normal(hidden, width) * width**-0.5
        first, gates = normal(outs, hidden) * hidden**-0.5, normal(2 * outs, hidden) * hidden**-0.5
        before = residual.double()
        shape = Shape(splits=splits, depth=64)
        result = skinny(x, weight, space, residual=residual, next_norm=norm, shape=shape)
        assert result is residual
        close(residual, before + x.double() @ weight.double().t())

        wide = residual.double()
        normed = wide / (wide.square().mean(dim=1, keepdim=True) + 1e-6).sqrt() * norm.double()
        scaled = space.scaled[:rows]
        small, scales = quantize_rows(first)
        close(
            skinny(scaled, small, space, scales, eps=1e-6, norm=True),
            normed @ (small.double() * scales.double()).t(),
        )
        small, scales = quantize_rows(gates)
        gate, up = (normed @ (small.double() * scales.double()).t()).chunk(2, dim=1)
        act = skinny(scaled, small, space, scales, eps=1e-6, norm=True, gated=True)
        close(act, torch.nn.functional.silu(gate) * up)
        out = skinny(scaled, first, space, eps=1e-6, norm=True)
        close(out, normed @ first.double().t())
        assert torch.equal(out, skinny(scaled, first, space, eps=1e-6, norm=True))
        gate, up = (normed @ gates.double().t()).chunk(2, dim=1)
        act = skinny(scaled, gates, space, eps=1e-6, norm=True, gated=True)
        close(act, torch.nn.functional.silu(gate) * up)
        assert not space.arrived.any()
