"""Paths, file:// addresses, unknown names; and the revision of a folder that carries none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from leadline.engine.errors import ModelNotFound
from leadline.engine.hub import resolve_model


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "my model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    torch.manual_seed(0)
    save_file({"a": torch.randn(64, 64), "b": torch.randn(100)}, path / "model.safetensors")
    return path


def test_a_path_a_file_address_and_a_relative_path_name_the_same_model(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    address = "file://" + str(folder).replace(" ", "%20")
    models = [resolve_model(name) for name in (str(folder), address, "my model", "./my model")]
    assert models == [models[0]] * 4
    assert models[0].path == folder
    assert models[0].model_id == "my model"
    assert len(models[0].revision) == 32


def test_a_copy_has_the_same_revision_whatever_its_timestamps(folder, tmp_path):
    copy = tmp_path / "elsewhere" / "my model"
    shutil.copytree(folder, copy)
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    assert resolve_model(str(copy)).revision == resolve_model(str(folder)).revision


@pytest.mark.parametrize("change", ["one tensor", "shape", "config", "another file", "a name"])
def test_another_model_has_another_revision(change, folder):
    before = resolve_model(str(folder)).revision
    torch.manual_seed(0)
    tensors = {"a": torch.randn(64, 64), "b": torch.randn(100)}
    if change == "one tensor":
        tensors["b"] += 1e-3
    elif change == "shape":
        tensors["a"] = tensors["a"].reshape(32, 128)
    elif change == "config":
        (folder / "config.json").write_text("{}")
    elif change == "another file":
        save_file({"c": torch.zeros(1)}, folder / "more.safetensors")
    else:
        tensors["c"] = tensors.pop("b")
    save_file(tensors, folder / "model.safetensors")
    assert resolve_model(str(folder)).revision != before


def test_weights_that_are_a_link_to_nowhere_are_named(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../../blobs/gone")  # a hub's cache, copied in part
    with pytest.raises(ModelNotFound, match=r"model\.safetensors leads to no file"):
        resolve_model(str(folder))


def test_a_damaged_weight_file_still_has_a_revision_and_is_left_to_the_loader(folder):
    headers = (
        b"nonsense",
        b"[]",
        b"[1, 2]",
        b"7",
        b'{"a": 7}',
        b'{"a": {}}',
        b'{"a": {"data_offsets": [1]}}',
        b'{"a": {"data_offsets": ["x", "y"]}}',
        b'{"a": {"data_offsets": [-5000, -4000]}}',
        b'{"a": {"data_offsets": [0, %d]}}' % 10**30,
    )
    for content in (b"", b"abc", b"\xff" * 64, *(len(h).to_bytes(8, "little") + h for h in headers)):
        (folder / "model.safetensors").write_bytes(content)
        assert len(resolve_model(str(folder)).revision) == 32


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "empty"),
        ("meta-llama/Llama-3.1-8B", "write hf://meta-llama/Llama-3.1-8B"),
        ("Qwen/Qwen3-8B@main", "write hf://Qwen/Qwen3-8B@main"),
        ("SmolLM2-135M", "demo model's name is smollm2"),
        ("gpt4", "smollm2, hf://org/name"),
        ("/no/such/folder", "/no/such/folder.*does not exist"),
        ("file:///no/such/folder", "/no/such/folder.*does not exist"),
        ("file://server/models/x", "names a host, 'server'"),
        ("s3://bucket/model", "s3:// is not a scheme"),
    ],
)
def test_a_name_that_leads_nowhere_is_answered_with_what_would(name, words):
    with pytest.raises(ModelNotFound, match=words):
        resolve_model(name)


def test_a_folder_without_config_and_a_file_are_no_models(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match="GGUF file"):
        resolve_model(str(gguf))


def test_importing_the_hub_imports_nothing_heavy():
    program = (
        "import sys, leadline.engine.hub, leadline.engine.models\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'numpy') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert output.stdout.strip() == "[]", output.stderr
