"""Quantized checkpoints of every supported form give the logits of their reference dequantization."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import (
    SHAPE,
    awq,
    compressed_fields,
    fp8,
    gptq,
    mxfp4,
    nvfp4,
    quantize,
    whole_numbers,
)
from safetensors.torch import load_file, save_file
from test_tensor_parallel_shards import load_ranks
from tiny_checkpoints import build_reference, logits_of, reference_logits, reload_reference, save_reference

from leadline.engine.errors import ConfigError, UnsupportedModel
from leadline.engine.models import forms, load_model_config
from leadline.engine.models.forms import _check_groups
from leadline.engine.models.fp8 import quantize_rows
from leadline.engine.models.grouped import GroupedWeight
from leadline.engine.models.kv_scales import fold_kv_scales
from leadline.engine.models.loader import load_model
from leadline.engine.models.quantized_config import Layout, StoredAs
from leadline.engine.models.quantized_files import StoredLinear

TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def _whole(bits: int, group: int, symmetric: bool) -> dict:
    args = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    return compressed_fields(
        "pack-quantized", {"num_bits": bits, "type": "int", "symmetric": symmetric, **args}
    )


def _float(bits: int, written: str, **weights) -> dict:
    return compressed_fields(written, {"num_bits": bits, "type": "float", "symmetric": True, **weights})


def _gptq(bits: int, size: int, symmetric: bool, **more) -> dict:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric, "lm_head": False, **more
    }  # fmt: skip


INVERSE = {"weight_scale": "weight_scale_inv"}
CASES = {
    "fp8_channel": (fp8("channel"), _float(8, "float-quantized", strategy="channel"), None),
    "fp8_tensor": (fp8("tensor"), _float(8, "float-quantized", strategy="tensor"), None),
    "fp8_block": (
        fp8("block"),
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        },
        INVERSE,
    ),
    "fp8_compressed_block": (
        fp8("block"),
        _float(8, "float-quantized", strategy="block", block_structure=[128, 128]),
        None,
    ),
    "fp8_static": (fp8("tensor"), {"quant_method": "fp8", "activation_scheme": "static"}, None),
    "w4a16_32": (whole_numbers(4, 32, True), _whole(4, 32, True), None),
    "w4a16_32_zeros": (whole_numbers(4, 32, False), _whole(4, 32, False), None),
    "w4a16_rows": (whole_numbers(4, -1, True), _whole(4, -1, True), None),
    "w8a16_32": (whole_numbers(8, 32, True), _whole(8, 32, True), None),
    "w8a16_rows_zeros": (whole_numbers(8, -1, False), _whole(8, -1, False), None),
    "nvfp4": (nvfp4(), _float(4, "nvfp4-pack-quantized", strategy="tensor_group", group_size=16), None),
    "mxfp4": (mxfp4(), _float(4, "mxfp4-pack-quantized", strategy="group", group_size=32), None),
    "awq_32": (awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, None),
    "gptq_32": (gptq(4, 32, True), _gptq(4, 32, True), None),
    "gptq_32_zeros": (gptq(4, 32, False), _gptq(4, 32, False), None),
    "gptq_v2_zeros": (
        gptq(4, 32, False, version=2),
        _gptq(4, 32, False, checkpoint_format="gptq_v2"),
        None,
    ),
    "gptq_rows": (gptq(4, -1, True), _gptq(4, -1, True), None),
    "gptq_8_bits": (gptq(8, 32, False), _gptq(8, 32, False), None),
    "gptq_act_order": (gptq(4, 32, False, ordered=True), _gptq(4, 32, False, desc_act=True), None),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference(build_reference("llama", **SHAPE), tmp_path_factory.mktemp("base"))


def load(folder: Path, **options):
    options = {"dtype": torch.float32, "device": "cpu", "progress": False, **options}
    return load_model(folder, load_model_config(folder), **options)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_reference_dequantization_on_one_and_two_ranks(
    case: str, base: Path, tmp_path: Path
) -> None:
    packer, fields, renamed = CASES[case]
    quantized, plain = quantize(base, tmp_path, packer, fields, renamed=renamed)
    ids = torch.randint(0, 101, (23,), generator=torch.Generator().manual_seed(1))
    expected = logits_of(load(plain), ids)
    assert (expected - logits_of(load(base), ids)).abs().max() > 0.01, "rounding changes something"
    torch.testing.assert_close(logits_of(load(quantized), ids), expected, atol=2e-4, rtol=1e-4)
    ranks = load_ranks(quantized, 2)
    with ThreadPoolExecutor(2) as pool:
        for logits in pool.map(lambda model: logits_of(model, ids), ranks):
            torch.testing.assert_close(logits, expected, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("fp8_channel", "fp8_tensor")])
def test_the_layout_of_the_kernels_holds_the_same_weights(case: str, base: Path, tmp_path: Path) -> None:
    """Whole linears, and the columns of the second of two ranks."""
    packer, fields, renamed = CASES[case]
    quantized, plain = quantize(base, tmp_path, packer, fields, renamed=renamed)
    tensors, expected = load_file(quantized / "model.safetensors"), load_file(plain / "model.safetensors")
    config = load_model_config(quantized).quantized
    assert config is not None
    for name, width in (("self_attn.o_proj", 192), ("mlp.down_proj", 320)):
        module = f"model.layers.0.{name}"
        stored = config.of(module)
        assert stored is not None
        linear = StoredLinear(module, stored, (192, width), lambda name: _Slice.of(tensors, name))
        for first in (0, width // 2):
            if first % (stored.group or 1) or (first and stored.ordered):
                continue
            count = width - first
            weight = GroupedWeight(192, count, stored, torch.float32, torch.device("cpu"))
            weight.put(linear.codes(slice(0, 192), slice(first, width)), 0, module)
            x = torch.randn(3, count)
            wanted = x @ expected[f"{module}.weight"][:, first:].t()
            torch.testing.assert_close(weight(x), wanted, atol=1e-4, rtol=1e-4)
            assert (weight.order is not None) == stored.ordered


_TYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}


class _Slice:
    """A tensor with the methods of a safetensors slice."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor], name: str) -> _Slice | None:
        return cls(tensors[name]) if name in tensors else None

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return _TYPES[self.tensor.dtype]

    def __getitem__(self, index) -> torch.Tensor:
        return self.tensor[index]


def test_modules_that_stay_plain_are_read_plainly(base: Path, tmp_path: Path) -> None:
    """GPTQ's config does not name them; compressed-tensors' does."""
    alone = ["lm_head", "re:.*o_proj", "re:.*k_proj"]
    for folder, packer, fields in (
        ("gptq", gptq(4, 32, True), _gptq(4, 32, True)),
        (
            "fp8",
            fp8("channel"),
            {**CASES["fp8_channel"][1], "ignore": alone},
        ),
    ):
        skipped = ("lm_head", "embed_tokens", "norm", "o_proj", "k_proj")
        quantized, plain = quantize(base, tmp_path / folder, packer, fields, skipped=skipped)
        ids = torch.arange(9)
        torch.testing.assert_close(
            logits_of(load(quantized), ids), logits_of(load(plain), ids), atol=2e-4, rtol=1e-4
        )


def test_experts_are_dequantized(tmp_path: Path) -> None:
    changes = {"hidden_size": 96, "moe_intermediate_size": 64, "num_attention_heads": 4}
    base = save_reference(build_reference("qwen3_moe", **changes), tmp_path / "base")
    quantized, plain = quantize(base, tmp_path, awq(32), CASES["awq_32"][1])
    ids = torch.arange(20)
    torch.testing.assert_close(
        logits_of(load(quantized), ids), logits_of(load(plain), ids), atol=2e-4, rtol=1e-4
    )


MOE_WITH_A_GATE_OF_ONE_ROW = {"hidden_size": 96, "num_attention_heads": 4}
MOE_WITH_A_GATE_OF_ONE_ROW |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}


def test_one_row_with_zero_points_is_read() -> None:
    """Its zero points lie in the lowest bits of one word a group."""
    tensors = {
        "gate.weight_packed": torch.tensor([[0x76543210, -0x01234568] * 4], dtype=torch.int32),
        "gate.weight_scale": torch.tensor([[0.5, 2.0]]),
        "gate.weight_zero_point": torch.tensor([[3, 9]], dtype=torch.int32),
    }
    stored = StoredAs(Layout.PACKED, 4, 32, weight="weight_packed", zeros=True)
    linear = StoredLinear("gate", stored, (1, 64), lambda name: _Slice.of(tensors, name))
    codes = torch.cat([torch.arange(8), torch.arange(8, 16)] * 4).float()
    expected = torch.cat(((codes[:32] - 3) * 0.5, (codes[32:] - 9) * 2.0))[None]
    assert torch.equal(linear.plain(slice(0, 1), slice(0, 64)), expected)


def test_awq_of_a_row_that_fills_no_number_is_refused(tmp_path: Path) -> None:
    base = save_reference(build_reference("qwen2_moe", **MOE_WITH_A_GATE_OF_ONE_ROW), tmp_path / "base")
    quantized, _ = quantize(base, tmp_path, *CASES["awq_32"][:2])
    with pytest.raises(UnsupportedModel, match="shared_expert_gate has 1 rows; AWQ packs 8 of them"):
        load(quantized)


def test_tensors_that_do_not_fit_are_named(base: Path, tmp_path: Path) -> None:
    quantized, _ = quantize(base, tmp_path, *CASES["awq_32"][:2])
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.scales"
    for change, message in (
        (None, f"tensor {name} is missing"),
        (torch.zeros(3, 192).half(), r"scales has shape \[3, 192\]; config.json implies \[10, 192\]"),
        (torch.zeros(10, 192, dtype=torch.int32), "scales has dtype I32"),
    ):
        changed = {key: value for key, value in tensors.items() if key != name}
        save_file(changed if change is None else {**changed, name: change}, file)
        with pytest.raises(UnsupportedModel, match=message):
            load(quantized)


@pytest.mark.parametrize("group", [-1, 10])
def test_an_order_of_columns_that_names_no_group_is_refused(group: int, base: Path, tmp_path: Path) -> None:
    quantized, _ = quantize(base, tmp_path, *CASES["gptq_act_order"][:2])
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.g_idx"][7] = group
    save_file(tensors, file)
    with pytest.raises(UnsupportedModel, match=r"down_proj\.g_idx names a group beyond the 10 that"):
        load(quantized)


def test_a_quantized_checkpoint_is_not_quantized_again(base: Path, tmp_path: Path) -> None:
    quantized, _ = quantize(base, tmp_path, *CASES["awq_32"][:2])
    with pytest.raises(ConfigError, match=r"quantized already \(awq\): leave it out"):
        load(quantized, quantization="fp8")


@pytest.fixture
def grouped_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears are kept in groups, as on a GPU, and multiplied by the reference."""

    def form(linear, stored, quantization, device, name):
        _check_groups(linear, stored[0], name)
        return stored[0]

    monkeypatch.setattr(forms, "_form", form)


@pytest.mark.parametrize("case", ["w4a16_32_zeros", "w8a16_32", "nvfp4", "mxfp4", "awq_32", "gptq_32_zeros"])
def test_weights_kept_in_groups_give_the_same_logits_on_one_and_two_ranks(
    case: str, base: Path, tmp_path: Path, grouped_everywhere: None
) -> None:
    """Merged projections, padding, and columns of the second rank."""
    packer, fields, renamed = CASES[case]
    quantized, plain = quantize(base, tmp_path, packer, fields, renamed=renamed)
    ids = torch.arange(17)
    expected = reference_logits(reload_reference(plain, torch.float32), ids)
    whole = load(quantized)
    assert all(linear.grouped is not None for layer in whole.layers for linear in layer.linears)
    torch.testing.assert_close(logits_of(whole, ids), expected, atol=3e-4, rtol=1e-4)
    ranks = load_ranks(quantized, 2)
    with ThreadPoolExecutor(2) as pool:
        for logits in pool.map(lambda model: logits_of(model, ids), ranks):
            torch.testing.assert_close(logits, expected, atol=3e-4, rtol=1e-4)


def test_act_order_takes_inputs_in_its_order_and_cannot_be_split(
    base: Path, tmp_path: Path, grouped_everywhere: None
) -> None:
    packer, fields, _ = CASES["gptq_act_order"]
    quantized, plain = quantize(base, tmp_path, packer, fields)
    ids = torch.arange(17)
    expected = reference_logits(reload_reference(plain, torch.float32), ids)
    torch.testing.assert_close(logits_of(load(quantized), ids), expected, atol=3e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match=r"desc_act: .*o_proj .* cannot be split over 2 ranks"):
        load_ranks(quantized, 2)


def test_a_group_that_ranks_would_share_is_refused(
    base: Path, tmp_path: Path, grouped_everywhere: None
) -> None:
    packer, fields, renamed = CASES["fp8_block"]
    quantized, plain = quantize(base, tmp_path, packer, fields, renamed=renamed)
    ids = torch.arange(17)
    expected = reference_logits(reload_reference(plain, torch.float32), ids)
    torch.testing.assert_close(logits_of(load(quantized), ids), expected, atol=3e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match=r"tensor_parallel 2 cuts .*o_proj inside a group of 128 columns"):
        load_ranks(quantized, 2)


@pytest.mark.parametrize("case", ["awq_32", "nvfp4"])
def test_scales_of_the_kv_cache_go_into_the_scales_of_groups(
    case: str, base: Path, tmp_path: Path, grouped_everywhere: None
) -> None:
    """Powers of two: equal to the last bit."""
    quantized, _ = quantize(base, tmp_path, *CASES[case][:2])
    model, ids = load(quantized), torch.arange(40)
    before = logits_of(model, ids)
    exponents = fold_kv_scales(model)
    assert any(any(keys) and any(values) for keys, values in exponents)
    assert all(len(set(values)) == 1 for _, values in exponents), "the output projection has scales of rows"
    assert torch.equal(logits_of(model, ids), before)


def test_random_weights_of_every_kind_are_about_as_large_as_plain_ones(
    base: Path, tmp_path: Path, grouped_everywhere: None
) -> None:
    for case, (packer, fields, renamed) in CASES.items():
        if case.startswith(("fp8_channel", "fp8_tensor", "fp8_static")):
            continue
        quantized, _ = quantize(base, tmp_path / case, packer, fields, renamed=renamed)
        layer = load(quantized, load_format="dummy").layers[0]
        assert 0.015 < layer.qkv.grouped.plain().std() < 0.025, case


@pytest.fixture
def fp8_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears and experts are kept in FP8, as on a GPU; nothing multiplies them here."""
    monkeypatch.setattr(forms, "_is_gpu", lambda device: True)
    monkeypatch.setattr(forms, "has_fp8", lambda device: True)


BF16 = torch.bfloat16
SPARSE = {
    "hidden_size": 96,
    "moe_intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "mlp_only_layers": [1],
    "intermediate_size": 128,
}


def matrices_of(layer) -> list[torch.Tensor]:
    """Every weight of a layer in float32, whatever its form."""
    found = [
        linear.weight.float() * (1.0 if linear.scale is None else linear.scale) for linear in layer.linears
    ]
    if layer.experts is not None:
        pair = (layer.experts.gate_up.float(), layer.experts.down.float())
        scales = layer.experts.scales
        found += (
            pair if scales is None else [one * of[:, :, None] for one, of in zip(pair, scales, strict=True)]
        )
    return found


@pytest.mark.parametrize(("case", "grouped"), [("fp8_block", False), ("nvfp4", False), ("awq_32", True)])
def test_a_gpu_that_cannot_read_fp8_gets_plain_weights(
    case: str,
    grouped: bool,
    base: Path,
    tmp_path: Path,
    fp8_everywhere: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packer, fields, renamed = CASES[case]
    quantized, _ = quantize(base, tmp_path, packer, fields, renamed=renamed)
    monkeypatch.setattr(forms, "_multiplies_groups", lambda dtype: True)
    for has_fp8, expected in ((True, True), (False, grouped)):
        monkeypatch.setattr(forms, "has_fp8", lambda device, has_fp8=has_fp8: has_fp8)
        model = load(quantized, dtype=BF16)
        assert all(
            (linear.grouped is not None) == expected for layer in model.layers for linear in layer.linears
        )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", ["fp8_channel", "fp8_static"])
def test_fp8_with_scales_of_rows_is_kept_as_it_is_stored(
    case: str, ranks: int, tmp_path: Path, fp8_everywhere: None
) -> None:
    base = save_reference(build_reference("qwen3_moe", **SPARSE), tmp_path / "base")
    packer, fields, _ = CASES[case]
    quantized, plain = quantize(base, tmp_path, packer, fields)
    ours, theirs = (load_ranks(folder, ranks, dtype=BF16) for folder in (quantized, plain))
    for one, other in zip(ours, theirs, strict=True):
        for layer, reference in zip(one.layers, other.layers, strict=True):
            for linear in layer.linears:
                assert linear.weight.dtype == torch.float8_e4m3fn
            for left, right in zip(matrices_of(layer), matrices_of(reference), strict=True):
                torch.testing.assert_close(left.to(BF16), right.to(BF16), atol=0, rtol=0)
    assert ours[0].layers[0].experts.gate_up.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("ranks", [1, 2])
def test_plain_weights_are_rounded_to_fp8_slice_by_slice(
    ranks: int, tmp_path: Path, fp8_everywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_reference(build_reference("qwen3_moe", **SPARSE).to(BF16), tmp_path)
    plain = load_ranks(folder, ranks, dtype=BF16)
    for model, reference in zip(
        load_ranks(folder, ranks, dtype=BF16, quantization="fp8"), plain, strict=True
    ):
        for layer, other in zip(model.layers, reference.layers, strict=True):
            for left, right in zip(layer.linears, other.linears, strict=True):
                values, scales = quantize_rows(right.weight)
                assert torch.equal(left.weight.view(torch.uint8), values.view(torch.uint8))
                assert torch.equal(left.scale, scales)
        experts, theirs = model.layers[0].experts, reference.layers[0].experts
        values, scales = quantize_rows(theirs.down.flatten(0, 1))
        assert torch.equal(experts.down.flatten(0, 1).view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(experts.scales[1].flatten(), scales.flatten())
        assert torch.equal(experts.router, theirs.router)


def test_a_quantized_head_is_dequantized(base: Path, tmp_path: Path) -> None:
    packer, fields, _ = CASES["fp8_channel"]
    quantized, plain = quantize(
        base, tmp_path, packer, {**fields, "ignore": []}, skipped=("embed_tokens", "norm")
    )
    assert load_file(quantized / "model.safetensors")["lm_head.weight"].dtype == torch.float8_e4m3fn
    ids = torch.arange(9)
    torch.testing.assert_close(
        logits_of(load(quantized), ids), logits_of(load(plain), ids), atol=2e-4, rtol=1e-4
    )
