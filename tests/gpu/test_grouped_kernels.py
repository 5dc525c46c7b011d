"""Weights in groups of columns on a GPU: each kernel against the reference in float64, and whole models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from quantized_checkpoints import awq, gptq, quantize
from tiny_checkpoints import attend_whole

from gpu_models import QUANTIZED, SHAPES, write_model, write_weights
from leadline.engine import LLM, SamplingParams
from leadline.engine.errors import ConfigError
from leadline.engine.models import load_model_config, triton_grouped
from leadline.engine.models.fp8 import FP8, has_fp8, quantize_rows
from leadline.engine.models.grouped import GroupedWeight
from leadline.engine.models.loader import load_model
from leadline.engine.models.quantized_config import Layout, StoredAs

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
BF16, F16 = torch.bfloat16, torch.float16
STORED = {
    "int4_128": StoredAs(Layout.PACKED, 4, 128),
    "int4_128_zeros": StoredAs(Layout.AWQ, 4, 128, zeros=True),
    "int4_64": StoredAs(Layout.PACKED, 4, 64),
    "int4_32_zeros": StoredAs(Layout.PACKED, 4, 32, zeros=True),
    "int4_rows": StoredAs(Layout.PACKED, 4, 0),
    "int8_128": StoredAs(Layout.PACKED, 8, 128),
    "int8_32_zeros": StoredAs(Layout.GPTQ, 8, 32, zeros=True),
    "nvfp4": StoredAs(Layout.FP4, 4, 16, global_scale="weight_global_scale"),
    "mxfp4": StoredAs(Layout.FP4, 4, 32),
    "fp8_block": StoredAs(Layout.FP8, 8, 128, block_rows=128),
}


def random_weight(name: str, rows: int, columns: int, dtype: torch.dtype) -> GroupedWeight:
    """Every code, scales that differ by a factor of four, zero points from 1 to 15 (8 bits: 255)."""
    generator = torch.Generator(CUDA).manual_seed(rows + columns)
    weight = GroupedWeight(rows, columns, STORED[name], dtype, CUDA)
    weight.fill_randomly(slice(0, rows), columns**-0.5, generator)
    spread = torch.rand(weight.scales.shape, generator=generator, device=CUDA) * 1.5 + 0.5
    weight.scales = (weight.scales.float() * spread).to(weight.scales.dtype)
    if weight.zeros is not None:
        weight.zeros.random_(1, 16 if STORED[name].bits == 4 else 256, generator=generator)
    return weight


def close(out: torch.Tensor, expected: torch.Tensor, bound: float = 6e-3) -> None:
    error = ((out.double() - expected).norm() / expected.norm()).item()
    assert error < bound, f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("rows", "columns"), [(48, 256), (1000, 1536), (4096, 4096), (96, 192)])
@pytest.mark.parametrize("name", STORED)
def test_products_of_every_kind_match_float64(name: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    weight = random_weight(name, rows, columns, dtype)
    exact = weight.plain().double()
    unpacked = triton_grouped.unpack(weight, dtype)
    close(unpacked, exact)
    if weight.row_scale is None:
        assert torch.equal(unpacked, exact.to(dtype)), "a weight is rounded once"
    for count in (1, 2, 16, 17, 64, 65, 200):
        x = torch.randn((count, columns), device=CUDA, dtype=dtype)
        out = triton_grouped.product(x, weight)
        close(out, x.double() @ exact.t())
        assert torch.equal(out, triton_grouped.product(x, weight)), "the same product gave other bits"


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("rows", "columns"), [(48, 256), (1024, 1536), (512, 12288), (96, 192)])
@pytest.mark.parametrize("name", STORED)
def test_one_row_with_norm_gate_and_residual_matches_float64(
    name: str, rows: int, columns: int, dtype: torch.dtype
) -> None:
    weight = random_weight(name, rows, columns, dtype)
    exact = weight.plain().double()
    x, norm = torch.randn((1, columns), device=CUDA, dtype=dtype), torch.rand(columns, device=CUDA) + 0.5
    norm = norm.to(dtype)
    close(triton_grouped.gemv(x, weight), x.double() @ exact.t())

    wide = x.double()
    normed = wide / (wide.square().mean() + 1e-6).sqrt() * norm.double()
    close(triton_grouped.gemv(x, weight, norm=(norm, 1e-6)), normed @ exact.t())
    gate, up = (normed @ exact.t()).chunk(2, dim=1)
    close(triton_grouped.gemv(x, weight, norm=(norm, 1e-6), gated=True), torch.nn.functional.silu(gate) * up)
    residual = torch.randn((1, rows), device=CUDA, dtype=dtype)
    expected = residual.double() + x.double() @ exact.t()
    assert triton_grouped.gemv(x, weight, residual=residual) is residual
    close(residual, expected)


@pytest.mark.parametrize(("name", "most"), [("int4_128", 1024), ("fp8_block", 64)])
def test_many_rows_go_through_the_unpacked_weight(name: str, most: int) -> None:
    weight = random_weight(name, 512, 1024, BF16)
    x = torch.randn((most + 1, 1024), device=CUDA, dtype=BF16)
    close(weight(x), x.double() @ weight.plain().double().t())
    assert torch.equal(weight(x), torch.mm(x, triton_grouped.unpack(weight, BF16).t()))
    assert torch.equal(weight(x[:most]), triton_grouped.product(x[:most], weight))


def test_columns_out_of_order_take_their_inputs() -> None:
    weight = random_weight("int4_32_zeros", 64, 256, BF16)
    weight.order = torch.randperm(256, device=CUDA)
    x = torch.randn((3, 256), device=CUDA, dtype=BF16)
    close(weight(x), x[:, weight.order].double() @ weight.plain().double().t())


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


@torch.inference_mode()
def give_unpacked(source: LLM, target: LLM) -> None:
    """Every weight of `source` into `target`, whose linears are plain."""
    ours, theirs = source.core.runner.model, target.core.runner.model
    for module in ("embed", "norm"):
        getattr(theirs, module).weight.copy_(getattr(ours, module).weight)
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        for name in ("before_attention", "before_mlp", "q_norm", "k_norm"):
            getattr(other, name).weight.copy_(getattr(one, name).weight)
        for left, right in zip(one.linears, other.linears, strict=True):
            assert left.grouped is not None
            right.weight.copy_(left.grouped.plain())


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("quantized", ["w4a16", "awq", "nvfp4", "mxfp4", "fp8-block"])
def test_an_engine_answers_as_one_with_the_unpacked_weights(
    quantized: str, eager: bool, tmp_path: Path
) -> None:
    shape = {**SHAPES["tiny"], "hidden_size": 256, "intermediate_size": 512}
    for name in ("packed", "plain"):
        (tmp_path / name).mkdir()
    packed = write_model(
        tmp_path / "packed", {**shape, "quantization_config": QUANTIZED[quantized]}, "bfloat16"
    )
    plain = write_model(tmp_path / "plain", shape, "bfloat16")
    ours, theirs = engine(packed, enforce_eager=eager), engine(plain, enforce_eager=True)
    give_unpacked(ours, theirs)
    prompts = [[(37 * i + 11 * n) % 12000 for i in range(n)] for n in (1, 17, 64, 130)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=16, logprobs=5)
    differences = []
    for some in ([prompts[2]], prompts):
        pairs = zip(
            ours.generate(some, params, use_tqdm=False),
            theirs.generate(some, params, use_tqdm=False),
            strict=True,
        )
        for mine, other in pairs:
            for a, b in zip(mine.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
                seen = dict([*b.top, (b.token_id, b.logprob)])
                differences.append(abs(a.logprob - seen[a.token_id]) if a.token_id in seen else 1.0)
                if a.token_id != b.token_id:
                    break
    assert len(differences) > 30
    assert sum(differences) / len(differences) < 0.05
    assert max(differences) < 0.5


@torch.inference_mode()
def logits_on_gpu(model, ids: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(ids), device=CUDA)
    return model.compute_logits(model.forward(ids.to(CUDA), positions, attend_whole(model))).float()


@pytest.mark.parametrize(
    ("packer", "fields"),
    [
        (awq(128), {"quant_method": "awq", "bits": 4, "group_size": 128}),
        (gptq(4, 64, False), {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False}),
        (
            gptq(4, 32, True, ordered=True),
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        ),
    ],
    ids=["awq", "gptq", "act_order"],
)
def test_files_give_the_logits_of_their_dequantization(packer, fields, tmp_path: Path) -> None:
    shape = {**SHAPES["tiny"], "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000}
    base = tmp_path / "base"
    base.mkdir()
    write_model(base, shape, "float16")
    write_weights(base, shape, "float16")
    quantized, plain = quantize(base, tmp_path, packer, fields)
    options = {"dtype": F16, "device": "cuda", "progress": False}
    ours = load_model(quantized, load_model_config(quantized), **options)
    theirs = load_model(plain, load_model_config(plain), **options)
    assert all(linear.grouped is not None for layer in ours.layers for linear in layer.linears)
    for count in (1, 20, 200):
        ids = torch.arange(count) * 7 % 1000
        close(logits_on_gpu(ours, ids), logits_on_gpu(theirs, ids).double(), 0.01)


def test_weights_in_fp8_are_those_that_rounding_afterwards_gave(tmp_path: Path) -> None:
    """And the whole model never lies in 16 bits on the GPU."""
    if not has_fp8(CUDA):
        pytest.skip("no FP8 tensor cores")
    shape = {**SHAPES["tiny"], "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}
    write_model(tmp_path, shape, "bfloat16")
    write_weights(tmp_path, shape, "bfloat16")
    config = load_model_config(tmp_path)
    options = {"dtype": BF16, "device": "cuda", "progress": False}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rounded = load_model(tmp_path, config, quantization="fp8", **options)
    after, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    assert peak < 1.4 * after
    plain = load_model(tmp_path, config, **options)
    for one, other in zip(rounded.layers, plain.layers, strict=True):
        for left, right in zip(one.linears, other.linears, strict=True):
            values, scales = quantize_rows(right.weight)
            assert left.weight.dtype == FP8
            assert torch.equal(left.weight.view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(left.scale, scales)


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    folder = write_model(tmp_path, {**SHAPES["tiny"], "quantization_config": QUANTIZED["w4a16"]}, "bfloat16")
    assert json.loads((folder / "config.json").read_text())["quantization_config"]
    with pytest.raises(ConfigError, match="quantized already"):
        engine(folder, quantization="fp8")
