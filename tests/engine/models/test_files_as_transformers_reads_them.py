"""Files that contradict themselves: read as transformers reads them, or refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import (
    ARCHITECTURES,
    BASE,
    OF_FAMILY,
    build_reference,
    logits_of,
    reload_reference,
    save_reference,
)
from tiny_checkpoints import reference_logits as expected_logits

from leadline.engine.config import EngineConfig
from leadline.engine.core_process.engine_core import EngineCore
from leadline.engine.errors import UnsupportedModel
from leadline.engine.hub.local import LocalModel
from leadline.engine.models import load_model_config
from leadline.engine.models.loader import load_model

IDS = torch.arange(30)


def load(folder):
    return load_model(folder, load_model_config(folder), dtype=torch.float32, device="cpu", progress=False)


def change_config(folder, **changes):
    file = folder / "config.json"
    fields = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))


def change_tensors(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def agree(folder):
    ours, theirs = logits_of(load(folder), IDS), expected_logits(reload_reference(folder, torch.float32), IDS)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    return ours


def rename(tensors, old, new):
    tensors[new] = tensors.pop(old)


def test_a_head_that_the_config_ties_but_the_file_has_otherwise_is_used(tmp_path):
    folder = save_reference(build_reference("llama", tie_word_embeddings=True), tmp_path)
    tied = agree(folder)
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": torch.randn(101, 48)}))
    assert not torch.allclose(agree(folder), tied)
    assert not load(folder).head.tied


def test_a_tied_model_may_name_its_one_matrix_after_the_head(tmp_path):
    folder = save_reference(build_reference("qwen2", tie_word_embeddings=True), tmp_path)
    before = agree(folder)
    change_tensors(folder, lambda t: rename(t, "model.embed_tokens.weight", "lm_head.weight"))
    assert torch.equal(agree(folder), before)


def test_a_head_that_is_neither_tied_nor_there_is_missing(tmp_path):
    folder = save_reference(build_reference("llama", tie_word_embeddings=True), tmp_path)
    change_config(folder, tie_word_embeddings=False)
    with pytest.raises(UnsupportedModel, match=r"missing: lm_head\.weight"):
        load(folder)


@pytest.mark.parametrize(
    "extra",
    [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.2.self_attn.o_proj.bias",
        "model.layers.3.mlp.up_proj.weight",
        "lm_head.bias",
        "score.weight",
    ],
)
def test_a_tensor_that_the_config_denies_is_refused(extra, tmp_path):
    # transformers leaves it out with a warning: the model was trained with it.
    folder = save_reference(build_reference("llama"), tmp_path)
    change_tensors(folder, lambda tensors: tensors.update({extra: torch.ones(8)}))
    with pytest.raises(UnsupportedModel, match=f"unexpected: {extra}"):
        load(folder)


def test_two_sets_of_shards_without_an_index_are_refused(tmp_path):
    folder = save_reference(build_reference("llama"), tmp_path, max_shard_size="60KB")
    (folder / "model.safetensors.index.json").unlink()
    load(folder)
    first = sorted(folder.glob("*.safetensors"))[0]
    save_file(load_file(first), folder / "model-00001-of-00002.safetensors")
    with pytest.raises(UnsupportedModel, match=r"tensor \S+ is in both model-00001-of-0000\d"):
        load(folder)


def test_a_tensor_in_two_shards_of_an_index_is_refused(tmp_path):
    folder = save_reference(build_reference("llama"), tmp_path, max_shard_size="60KB")
    last = sorted(folder.glob("*.safetensors"))[-1]
    save_file({**load_file(last), "model.embed_tokens.weight": torch.zeros(101, 48)}, last)
    with pytest.raises(UnsupportedModel, match=r"tensor model\.embed_tokens\.weight is in both"):
        load(folder)


def test_shards_that_the_index_does_not_name_are_not_read(tmp_path):
    folder = save_reference(build_reference("llama"), tmp_path, max_shard_size="60KB")
    save_file({"model.norm.weight": torch.zeros(48)}, folder / "model-00001-of-00009.safetensors")
    agree(folder)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES = {
    "new spelling": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "old spelling": {"rope_theta": 500.0, "rope_scaling": None},
    "inner and outer base": {
        "rope_theta": 90.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 7e3},
    },
    "base beside": {"rope_theta": 90.0, "rope_parameters": {"rope_type": "linear", "factor": 3.0}},
    "no base at all": {},
    "two scalings": {
        "rope_theta": 300.0,
        "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 7e3},
        "rope_scaling": {"type": "linear", "factor": 8.0},
    },
    "scaling beside plain parameters": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 7e3},
        "rope_scaling": LLAMA3,
    },
    "empty scaling": {"rope_parameters": {**LLAMA3, "rope_theta": 7e3}, "rope_scaling": {}},
    "two names of the type": {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}},
    "outer original length": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 32},
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 80.0},
}


@pytest.mark.parametrize("fields", ROPES.values(), ids=ROPES)
def test_both_spellings_of_rope_mean_what_transformers_takes_them_for(fields, tmp_path):
    folder = save_reference(build_reference("llama"), tmp_path)
    change_config(folder, **{"rope_parameters": ..., **fields})
    agree(folder)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_fields_that_are_absent_have_the_values_of_transformers(family, tmp_path):
    from transformers import AutoConfig

    shape = {**BASE, **OF_FAMILY.get(family, {}), "head_dim": 8, "max_position_embeddings": 64}
    for name in ("rms_norm_eps", "num_key_value_heads", "initializer_range", "sliding_window"):
        shape.pop(name, None)
    shape |= {"num_attention_heads": 32, "hidden_size": 256}
    fields = {**shape, "architectures": [ARCHITECTURES[family]], "model_type": family}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    ours, theirs = load_model_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.num_kv_heads == theirs.num_key_value_heads
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * ours.num_layers
    for layer, kind in zip(ours.layers, kinds, strict=True):
        rope = theirs.rope_parameters.get(kind, theirs.rope_parameters)
        assert layer.rope is None or layer.rope.theta == rope["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    assert ours.attention_bias == getattr(theirs, "attention_bias", family in ("qwen2", "qwen2_moe"))
    window = getattr(theirs, "sliding_window", None) if getattr(theirs, "use_sliding_window", True) else None
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    assert [layer.window for layer in ours.layers] == windows
    assert ours.attention_softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.logits_softcap == getattr(theirs, "final_logit_softcapping", None)
    if ours.experts is not None:
        assert ours.experts.per_token == theirs.num_experts_per_tok
        assert ours.experts.renormalize == getattr(theirs, "norm_topk_prob", True)
    assert ours.unknown_fields == ()


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_nothing_that_transformers_writes_is_unknown(family, tmp_path):
    build_reference(family).config.save_pretrained(tmp_path)
    change_config(tmp_path, architectures=[ARCHITECTURES[family]])
    assert load_model_config(tmp_path).unknown_fields == ()


def test_unknown_fields_are_named_in_one_line_of_the_log(tmp_path, caplog):
    folder = save_reference(build_reference("llama"), tmp_path)
    change_config(folder, zeta=1, alpha=[2])
    config = EngineConfig(str(folder), device="cpu", num_kv_blocks=16, block_size=16)
    EngineCore(config, LocalModel(folder, "tiny", "0"), progress=False)
    (line,) = [record.getMessage() for record in caplog.records if "config.json" in record.getMessage()]
    assert line.endswith("have no effect: alpha, zeta")
