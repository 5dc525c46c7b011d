"""What quantization_config says about each linear, and which forms are refused by the name of a field."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from leadline.engine.errors import UnsupportedModel
from leadline.engine.models import quantized_config
from leadline.engine.models.quantized_config import Layout, QuantizedConfig, read_quantization

Q, OUT, GATE = (f"model.layers.3.{name}" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate"))
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def compressed(weights: Any, written: str = "float-quantized", **more: Any) -> dict[str, Any]:
    group = {"targets": more.pop("targets", ["Linear"]), "weights": weights, **more.pop("group", {})}
    return {
        "quant_method": "compressed-tensors", "format": written, "config_groups": {"group_0": group}, **more
    }  # fmt: skip


def read(fields: Any) -> QuantizedConfig:
    config = read_quantization({"quantization_config": fields})
    assert config is not None
    return config


def test_a_plain_checkpoint_has_none():
    assert read_quantization({"quantization_config": None}) is None
    assert read_quantization({}) is None


def test_names_and_patterns_that_compressed_tensors_ignores():
    config = read(
        compressed(FP8, ignore=["lm_head", "re:.*mlp\\.gate$", "re:.*layers\\.3\\.self_attn\\.q.*"])
    )
    assert config.of("lm_head") is None
    assert config.of(GATE) is None
    assert config.of(f"{GATE}_proj") is not None
    assert config.of(Q) is None
    assert config.of(OUT) is not None


def test_the_closest_target_counts():
    fields = compressed(FP8, "mixed-precision", group={"format": "float-quantized"})
    fields["config_groups"]["group_1"] = {
        "targets": ["re:.*self_attn.*"], "weights": INT4, "format": "pack-quantized"
    }  # fmt: skip
    config = read(fields)
    assert config.of(Q).layout is Layout.PACKED
    assert config.of(f"{GATE}_proj").layout is Layout.FP8


@pytest.mark.parametrize("field", ["modules_to_not_convert", "ignored_layers"])
def test_modules_that_fp8_leaves_alone_are_parts_of_a_name(field):
    config = read({"quant_method": "fp8", field: ["lm_head", "mlp.gate", "model.layers.3.self_attn.q_proj"]})
    assert [config.of(name) is None for name in (Q, OUT, GATE, f"{GATE}_proj", "lm_head")] == [
        True, False, True, False, True
    ]  # fmt: skip
    assert config.of("model.layers.33.self_attn.q_proj") is not None


def test_patterns_of_modelopt():
    config = read(
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "*o_proj"]}
    )
    assert config.of(OUT) is None
    assert config.of(Q).is_fp8_rows


def test_zero_points_of_both_versions_of_gptq():
    first = read({**GPTQ, "sym": False}).of(Q)
    assert first.zero_offset == 1
    for field in ("checkpoint_format", "format"):
        assert read({**GPTQ, "sym": False, field: "gptq_v2"}).of(Q).zero_offset == 0
    assert first.zeros
    assert not read(GPTQ).of(Q).zeros


@pytest.mark.parametrize("field", ["ignore", "targets"])
def test_a_pattern_that_takes_too_long_is_refused(field, monkeypatch):
    monkeypatch.setattr(quantized_config, "_MATCH_SECONDS", 0.05)
    config = read(compressed(FP8, **{field: [r"re:(.|\w)+(?<!j)$"]}))
    with pytest.raises(UnsupportedModel, match=r"the pattern 're:.* takes too long for model\.layers"):
        config.of(f"{Q}.{Q}")


def test_one_group_a_row_has_no_order():
    assert read({**GPTQ, "desc_act": True}).of(Q).ordered
    assert not read({**GPTQ, "desc_act": True, "group_size": -1}).of(Q).ordered


def test_ranks_get_it_over_a_pipe():
    config = read(compressed(FP8, ignore=["re:.*gate$"]))
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("int4", "quantization_config must be an object"),
        (
            {"quant_method": "bitsandbytes"},
            "quant_method 'bitsandbytes' is not supported",
        ),
        ({**GPTQ, "bits": 3}, "quantization_config.bits 3 is not supported; supported: 4, 8"),
        ({**GPTQ, "group_size": 48}, "quantization_config.group_size 48"),
        ({**GPTQ, "dynamic": {"-:.*down.*": {}}}, "quantization_config.dynamic .* must be left out"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({**GPTQ, "format": "marlin"}, "quantization_config.format 'marlin'"),
        ({**AWQ, "version": "gemv"}, "quantization_config.version 'gemv'"),
        ({**AWQ, "version": None, "format": "gemv_fast"}, "quantization_config.format 'gemv_fast'"),
        ({**AWQ, "bits": 8}, "quantization_config.bits 8"),
        ({**AWQ, "zero_point": False}, "quantization_config.zero_point False"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "quantization_config.fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        (compressed(FP8, "int-quantized"), "quantization_config.format 'int-quantized'"),
        (compressed({**INT4, "num_bits": 8}, "int-quantized"), "quantization_config.format 'int-quantized'"),
        (compressed({**INT4, "num_bits": 2}, "pack-quantized"), "config_groups.group_0.weights.num_bits 2"),
        (compressed({**INT4, "group_size": 48}, "pack-quantized"), "weights.group_size 48"),
        (
            compressed(INT4, "pack-quantized", group={"input_activations": {"num_bits": 8, "type": "int"}}),
            "group_0.input_activations",
        ),
        (compressed({**FP8, "strategy": "group"}), "weights.strategy 'group'"),
        (compressed({**FP8, "strategy": "block", "block_structure": [64, 64]}), "weights.block_structure"),
        (compressed(FP8, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format"),
        (compressed(FP8, transform_config={"config_groups": {"R1": {}}}), "transform_config"),
        (compressed(FP8, ignore=["re:("]), "quantization_config.ignore"),
        (compressed(FP8, ignore=["re:" + "(" * 9999]), "quantization_config.ignore"),
        (compressed(FP8, ignore=["re:a{99999999999}"]), "quantization_config.ignore"),
        (compressed(FP8, config_groups={"group_0": None}), "config_groups.group_0 None"),
        (compressed(None), "group_0.weights None"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups"),
    ],
)
def test_a_form_that_is_not_supported_is_refused_by_its_field(fields, message):
    with pytest.raises(UnsupportedModel, match=message):
        read(fields)
