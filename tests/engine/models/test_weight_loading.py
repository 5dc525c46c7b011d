"""Reading safetensors: shards, mismatches, memory, and weights out of nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import BASE, OF_FAMILY, build_reference, logits_of, reference_logits, save_reference

from leadline.engine.errors import ModelNotFound, UnsupportedModel
from leadline.engine.models import load_model_config
from leadline.engine.models.loader import load_model

IDS = torch.arange(30)


def load(folder, **options):
    config = options.pop("config", None) or load_model_config(folder)
    options = {"dtype": torch.float32, "device": "cpu", "progress": False, **options}
    return load_model(folder, config, **options)


def rewrite(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_a_sharded_checkpoint_loads_through_its_index(tmp_path):
    reference = build_reference("qwen2")
    folder = save_reference(reference, tmp_path, max_shard_size="60KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    torch.testing.assert_close(
        logits_of(load(folder), IDS), reference_logits(reference, IDS), atol=2e-4, rtol=1e-4
    )


def test_the_bytes_read_so_far_are_told_from_none_to_all(tmp_path):
    folder = save_reference(build_reference("llama"), tmp_path, max_shard_size="60KB")
    told = []
    load(folder, report=lambda *report: told.append(report))
    shares = [share for _, share, _ in told]
    assert {stage for stage, _, _ in told} == {"loading weights"}
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert len(shares) > 4
    assert shares == sorted(set(shares))


def test_a_missing_shard_is_named(tmp_path):
    folder = save_reference(build_reference("llama"), tmp_path, max_shard_size="60KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelNotFound, match=shard.name):
        load(folder)


def test_a_truncated_file_is_named(tmp_path):
    folder = save_reference(build_reference("llama"), tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelNotFound, match=r"model\.safetensors cannot be read"):
        load(folder)


def test_a_folder_without_safetensors_is_refused(tmp_path):
    folder = save_reference(build_reference("llama"), tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match=r"no \*\.safetensors"):
        load(folder)


def test_a_missing_tensor_is_named(tmp_path):
    folder = save_reference(build_reference("llama"), tmp_path)
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(UnsupportedModel, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_a_tensor_we_have_no_place_for_is_named(tmp_path):
    folder = save_reference(build_reference("llama"), tmp_path)
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}))
    with pytest.raises(UnsupportedModel, match=r"unexpected: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path):
    folder = save_reference(build_reference("llama"), tmp_path)
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight has shape \[47\].*\[48\]"):
        load(folder)


def test_a_tensor_of_whole_numbers_is_named(tmp_path):
    folder = save_reference(build_reference("llama"), tmp_path)
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight has dtype I8"):
        load(folder)


def test_buffers_of_old_checkpoints_and_a_copy_of_tied_weights_are_passed_over(tmp_path):
    reference = build_reference("llama", tie_word_embeddings=True)
    folder = save_reference(reference, tmp_path)
    extra = {
        "lm_head.weight": reference.lm_head.weight.detach().clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    rewrite(folder, lambda tensors: tensors.update(extra))
    assert load(folder).head.tied
    torch.testing.assert_close(
        logits_of(load(folder), IDS), reference_logits(reference, IDS), atol=2e-4, rtol=1e-4
    )


def test_consolidated_copies_beside_shards_are_not_read(tmp_path):
    folder = save_reference(build_reference("mistral"), tmp_path)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    save_file({"tok_embeddings.weight": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert load(folder).num_layers == 3


def test_dummy_weights_need_no_files_and_follow_the_seed(tmp_path):
    folder = save_reference(build_reference("qwen3", head_dim=16), tmp_path)
    (folder / "model.safetensors").unlink()
    one, same, other = (logits_of(load(folder, load_format="dummy", seed=s), IDS) for s in (1, 1, 2))
    assert torch.isfinite(one).all()
    assert one.std() > 0
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_packing_weights_for_the_cpu_changes_no_logit_by_more_than_rounding(tmp_path):
    folder = save_reference(build_reference("llama", attention_bias=True, mlp_bias=True), tmp_path)
    packed = load(folder)
    assert packed.layers[0].qkv.packed is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leadline.engine.models.layers.can_pack", lambda weight: False)
        plain = load(folder)
    assert plain.layers[0].qkv.packed is None
    for length in (1, 3, 30):
        torch.testing.assert_close(
            logits_of(packed, IDS[:length]), logits_of(plain, IDS[:length]), atol=1e-4, rtol=1e-4
        )


MEASURE = """
import sys, threading, torch
from leadline.engine.models import load_model_config
from leadline.engine.models.loader import load_model
folder, dtype = sys.argv[1], getattr(torch, sys.argv[2])

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

from safetensors import safe_open
import leadline.engine.models.loader as loader
peak, copy = 0, loader._copy
def watched(*arguments):
    global peak
    copy(*arguments)
    peak = max(peak, anonymous())
loader._copy = watched
torch.ones(8, 8) @ torch.ones(8, 8)
before = anonymous()
model = load_model(folder, load_model_config(folder), dtype=dtype, device="cpu", progress=False)
print(peak - before, anonymous() - before)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_never_holds_the_weights_twice(dtype, tmp_path):
    # 17 MB a layer, 8 layers: far more than any single tensor or the noise of an allocator.
    shape = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 256}
    reference = build_reference("llama", **shape, num_attention_heads=8, num_key_value_heads=2)
    folder = save_reference(reference.to(getattr(torch, dtype)), tmp_path, max_shard_size="40MB")
    weights = sum(p.numel() * p.element_size() for p in reference.parameters())
    output = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), dtype], capture_output=True, text=True, timeout=120
    )
    assert output.returncode == 0, output.stderr
    peak, after = map(int, output.stdout.split())
    assert weights * 0.9 < after < weights * 1.25
    assert peak < weights * 1.25


def test_a_shorter_rotary_table_serves_a_shorter_context(tmp_path):
    folder = save_reference(build_reference("llama"), tmp_path)
    config = load_model_config(folder)
    short = load(folder, max_positions=32)
    assert short.rope_tables[0][0].shape == (32, config.head_dim)
    assert torch.equal(logits_of(short, IDS), logits_of(load(folder), IDS))


def test_an_expert_that_is_missing_is_named(tmp_path):
    folder = save_reference(build_reference("qwen3_moe"), tmp_path)
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.experts.6.up_proj.weight"))
    with pytest.raises(UnsupportedModel, match=r"missing: model\.layers\.1\.mlp\.experts\.6\.up_proj"):
        load(folder)


def test_experts_in_fp8_are_near_their_16_bits(tmp_path):
    folder = save_reference(build_reference("qwen3_moe", mlp_only_layers=[0]), tmp_path)
    plain, rounded = load(folder), load(folder, quantization="fp8")
    plain_experts, experts = plain.layers[1].experts, rounded.layers[1].experts
    assert not torch.equal(plain_experts.gate_up, experts.gate_up)
    assert not torch.equal(plain_experts.down, experts.down)
    assert torch.equal(plain_experts.router, experts.router)
    x = torch.randn(20, 48)
    expected = plain_experts.partial(x)
    error = (experts.partial(x) - expected).norm() / expected.norm()
    assert 0.005 < error < 0.1, "e4m3 rounds by 2.6 % RMS"


@pytest.mark.parametrize("index", ["[]", '{"weight_map": []}', '{"weight_map": {"a": ["b"]}}', "{"])
def test_an_index_of_another_shape_is_named(index, tmp_path):
    folder = save_reference(build_reference("llama"), tmp_path)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelNotFound, match=r"model\.safetensors\.index\.json is no safetensors index"):
        load(folder)


def wrapped_reference(name):
    """A model of text and images by transformers, small."""
    import transformers

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    wrapper, text, tower, beside = {
        "gemma3": ("Gemma3", "gemma3_text", "siglip_vision_model", {"mm_tokens_per_image": 4}),
        "mistral3": ("Mistral3", "mistral", "pixtral", {"tie_word_embeddings": False}),
        "mistral3 with ministral3": ("Mistral3", "ministral3", "pixtral", {"tie_word_embeddings": False}),
    }[name]
    config = getattr(transformers, f"{wrapper}Config")(
        text_config={**BASE, **OF_FAMILY[text], "model_type": text},
        vision_config={**vision, "model_type": tower},
        image_token_index=100,
        **beside,
    )
    torch.manual_seed(1)
    return getattr(transformers, f"{wrapper}ForConditionalGeneration")(config).eval()


@pytest.mark.parametrize("marked", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("name", ["gemma3", "mistral3", "mistral3 with ministral3"])
def test_the_text_half_of_a_model_of_images_is_served_and_one_warning_names_the_rest(
    name, marked, tmp_path, caplog
):
    reference = wrapped_reference(name)
    folder = save_reference(reference, tmp_path)

    def mark(tensors):
        for old in list(tensors):
            for prefix in ("language_model.model.", "model.language_model."):
                if old.startswith(prefix):
                    tensors[marked + old.removeprefix(prefix)] = tensors.pop(old)

    rewrite(folder, mark)
    with torch.inference_mode():
        expected = reference(IDS[None]).logits[0]
    assert expected.std() > 0.5
    torch.testing.assert_close(logits_of(load(folder), IDS), expected, atol=2e-4, rtol=1e-4)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "only the text half" in line
    assert "multi_modal_projector" in line


@pytest.mark.parametrize("family", ["glm4", "olmo2", "gemma3_text", "granite", "phi3", "glm4_moe"])
def test_variants_in_fp8_are_near_their_plain_weights(family, tmp_path):
    """Rows in another order keep their scales, and norms of all kinds take those of the cache."""
    folder = save_reference(build_reference(family), tmp_path)
    plain = logits_of(load(folder), IDS)
    for options, bound in (({"fp8_kv": True}, 1e-4), ({"quantization": "fp8"}, 0.25)):
        error = (logits_of(load(folder, **options), IDS) - plain).norm() / plain.norm()
        assert error < bound, options


def test_layers_that_only_draft_tokens_are_passed_over(tmp_path):
    reference = build_reference("glm4_moe")
    folder = save_reference(reference, tmp_path)
    rewrite(folder, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.ones(8)}))
    with pytest.raises(UnsupportedModel, match=r"unexpected: model\.layers\.3\.eh_proj"):
        load(folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "num_nextn_predict_layers": 1}))
    torch.testing.assert_close(
        logits_of(load(folder), IDS), reference_logits(reference, IDS), atol=2e-4, rtol=1e-4
    )
