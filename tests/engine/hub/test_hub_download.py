"""hf:// addresses, through the real huggingface_hub, against a hub served by this process.

huggingface_hub reads its environment when it is imported, so each look-up runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import COMMIT, CONFIG, FakeHub, Repository

FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "generation_config.json": b'{"eos_token_id": 2}',
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b'{"model_max_length": 8}',
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "modules.json": b"[]",
    "sentence_bert_config.json": b'{"max_seq_length": 8}',
    "config_sentence_transformers.json": b'{"prompts": {}}',
    "1_Pooling/config.json": b'{"pooling_mode": "cls"}',
    "1_Pooling/old/config.json": b"{}",
    "1_Dense/model.safetensors": b"a module that is refused",
    "2_Dense/config.json": b"{}",
    "additional_chat_templates/old/tool_use.jinja": b"{{ tools }}",
    "additional_chat_templates_of_old/tool_use.jinja": b"{{ tools }}",
    "additional/tokenizer.json": b"{}",
    "tokenizer/tokenizer.json": b"{}",
    "tokenizer/additional_chat_templates/rag.jinja": b"{{ documents }}",
    "model-00001-of-00001.safetensors": b"weights",
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "consolidated.safetensors": b"the weights again",
    "original/model.safetensors": b"and again",
    "pytorch_model.bin": b"and in a format that runs code",
    "modeling_x.py": b"code",
    "README.md": b"words",
}
WANTED = set(FILES) - {
    "1_Pooling/old/config.json",
    "1_Dense/model.safetensors",
    "2_Dense/config.json",
    "consolidated.safetensors",
    "original/model.safetensors",
    "pytorch_model.bin",
    "modeling_x.py",
    "README.md",
    "additional_chat_templates/old/tool_use.jinja",
    "additional_chat_templates_of_old/tool_use.jinja",
    "additional/tokenizer.json",
    "tokenizer/tokenizer.json",
    "tokenizer/additional_chat_templates/rag.jinja",
}

WATCH = """
import json, sys
from leadline.engine.hub import resolve_model
told = []
for _ in range(2):
    resolve_model(sys.argv[1], progress=False, report=lambda *report: told.append(report))
    told.append(None)
print(json.dumps(told))
"""
RESOLVE = """
import json, sys
from leadline.engine.errors import EngineError
from leadline.engine.hub import resolve_model
try:
    model = resolve_model(sys.argv[1], **json.loads(sys.argv[2]))
    print(json.dumps([str(model.path), model.model_id, model.revision]))
except EngineError as error:
    print(json.dumps({"type": type(error).__name__, "message": str(error)}))
"""

CHECKED = RESOLVE.replace("**json.loads(sys.argv[2])", "check=check_supported").replace(
    "import json, sys", "import json, sys\nfrom leadline.engine.pooling.spec import check_supported"
)


def resolve(name, home, endpoint, environment=None, **options):
    """What resolve_model gave in a fresh process: a list for a model, a dict for one of our errors."""
    return run(RESOLVE, home, endpoint, environment, name, json.dumps(options))


def run(script, home, endpoint, environment, *arguments):
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment = {**inherited, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, **(environment or {})}
    process = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_only_config_tokenizer_and_safetensors_files_are_fetched(tmp_path):
    with FakeHub({"org/name": Repository(FILES)}) as hub:
        path, model_id, revision = resolve("hf://org/name", tmp_path, hub.url)
        assert hub.fetched() == WANTED
    assert (model_id, revision) == ("org/name", COMMIT)
    assert path.startswith(str(tmp_path))
    files = [file for file in Path(path).rglob("*") if file.is_file()]
    assert {str(file.relative_to(path)): file.read_bytes() for file in files} == {
        name: FILES[name] for name in WANTED
    }


def test_a_download_tells_what_share_of_the_missing_bytes_has_come(tmp_path):
    weights = {f"model-{n}.safetensors": bytes([n]) * 3_000_000 for n in range(4)}
    files = {"config.json": b"{}", **weights}
    with FakeHub({"org/name": Repository(files)}) as hub:
        resolve("hf://org/name", tmp_path, hub.url, weights=False)
        *told, end, again = run(WATCH, tmp_path, hub.url, None, "hf://org/name")
    assert (end, again) == (None, None)  # nothing to tell when all is there
    assert {stage for stage, _, _ in told} == {"downloading"}
    shares = [share for _, share, _ in told]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert told[-1][2] == "0.01 of 0.01 GB"


def test_a_model_that_is_not_supported_is_refused_before_its_weights_are_fetched(tmp_path):
    quantized = {**CONFIG, "quantization_config": {"quant_method": "aqlm"}}
    for fields, expected in ((quantized, {"config.json"}), (CONFIG, {"config.json", "model.safetensors"})):
        files = {"config.json": json.dumps(fields).encode(), "model.safetensors": b"weights"}
        home = tmp_path / str(len(expected))
        with FakeHub({"org/name": Repository(files)}) as hub:
            answer = run(CHECKED, home, hub.url, None, "hf://org/name", "{}")
            assert hub.fetched() == expected
        if fields is quantized:
            assert answer["type"] == "UnsupportedModel"
            assert "quantization_config.quant_method 'aqlm'" in answer["message"]


def test_without_weights_only_the_small_files_are_fetched(tmp_path):
    with FakeHub({"org/name": Repository(FILES)}) as hub:
        resolve("hf://org/name", tmp_path, hub.url, weights=False)
        assert hub.fetched() == {name for name in WANTED if "safetensors" not in name}


def test_for_its_size_only_the_config_of_a_model_is_fetched(tmp_path):
    with FakeHub({"org/name": Repository(FILES)}) as hub:
        resolve("hf://org/name", tmp_path, hub.url, config_only=True)
        assert hub.fetched() == {"config.json", "generation_config.json"}


def test_a_revision_is_resolved_to_its_commit(tmp_path):
    other = "f" * 40
    repository = Repository(FILES, revisions={"main": COMMIT, "v2": other})
    with FakeHub({"org/name": repository}) as hub:
        path, model_id, revision = resolve("hf://org/name@v2", tmp_path, hub.url)
    assert (model_id, revision) == ("org/name", other)
    assert path.endswith(other)


def test_download_dir_replaces_the_hubs_cache(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    with FakeHub({"org/name": Repository(FILES)}) as hub:
        path, _, _ = resolve("hf://org/name", tmp_path / "home", hub.url, download_dir=str(elsewhere))
    assert path.startswith(str(elsewhere))


def test_what_is_cached_serves_offline_and_what_is_not_is_named(tmp_path):
    with FakeHub({"org/name": Repository(FILES)}) as hub:
        online = resolve("hf://org/name", tmp_path, hub.url)
        hub.requests.clear()
        assert resolve("hf://org/name", tmp_path, hub.url, {"HF_HUB_OFFLINE": "1"}) == online
        error = resolve("hf://org/other", tmp_path, hub.url, {"HF_HUB_OFFLINE": "1"})
        assert hub.requests == []
    assert error["type"] == "ModelNotFound"
    assert "HF_HUB_OFFLINE" in error["message"]


def test_a_hub_that_is_down_is_no_obstacle_to_a_cached_model(tmp_path):
    with FakeHub({"org/name": Repository(FILES)}) as hub:
        online = resolve("hf://org/name", tmp_path, hub.url)
    assert resolve("hf://org/name", tmp_path, hub.url) == online
    error = resolve("hf://org/other", tmp_path, hub.url)
    assert error["type"] == "ModelUnreachable"
    assert "cannot be reached" in error["message"]


class BrokenHub(FakeHub):
    """Answers every request with one status; 0 closes the connection in its stead."""

    status = 0

    def answer(self, path, authorization):
        if not self.status:
            raise ConnectionAbortedError("for the test")
        return self.status, {}, b"{}"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (500, "ModelUnreachable"),
        (503, "ModelUnreachable"),
        (429, "ModelUnreachable"),
        (0, "ModelUnreachable"),
        (410, "ModelNotFound"),
    ],
)
def test_a_hub_that_does_not_answer_now_is_told_from_a_model_it_does_not_have(status, kind, tmp_path):
    with BrokenHub({}) as hub:
        hub.status = status
        error = resolve("hf://org/name", tmp_path, hub.url)
    assert error["type"] == kind
    assert "hf://org/name" in error["message"]


class CutHub(FakeHub):
    """Closes the connection in the middle of the weights."""

    def send(self, out, path, body):
        out.write(body if "safetensors" not in path else body[: len(body) // 2])
        if "safetensors" in path:
            raise ConnectionAbortedError("for the test")


def test_a_download_that_breaks_off_may_be_tried_again(tmp_path):
    with CutHub({"org/name": Repository({**FILES, "model.safetensors": bytes(200_000)})}) as hub:
        error = resolve("hf://org/name", tmp_path, hub.url)
    assert error["type"] == "ModelUnreachable"


@pytest.mark.parametrize(
    ("endpoint", "kind"),
    [("http://no-such-host.invalid", "ModelUnreachable"), ("no-address", "ConfigError")],
)
def test_an_endpoint_without_a_host_and_one_that_is_no_address(endpoint, kind, tmp_path):
    error = resolve("hf://org/name", tmp_path, endpoint)
    assert error["type"] == kind
    assert ("cannot be reached" if kind == "ModelUnreachable" else "HF_ENDPOINT") in error["message"]


def test_the_token_is_sent_and_opens_a_private_model(tmp_path):
    with FakeHub({"org/name": Repository(FILES, token="secret")}) as hub:
        _, model_id, _ = resolve("hf://org/name", tmp_path, hub.url, {"HF_TOKEN": "secret"})
    assert model_id == "org/name"


@pytest.mark.parametrize(
    ("name", "repository", "token", "kind", "words"),
    [
        ("hf://org/none", Repository(FILES), None, "ModelNotFound", ["does not exist", "HF_TOKEN"]),
        ("hf://org/none", Repository(FILES), "t", "ModelNotFound", ["does not exist", "private"]),
        ("hf://org/name@v9", Repository(FILES), None, "ModelNotFound", ["no revision 'v9'"]),
        ("hf://org/name", Repository(FILES, token="s", gated=True), None, "Unauthorized", ["gated"]),
        ("hf://org/name", Repository(FILES, token="s"), "revoked", "Unauthorized", ["HF_TOKEN"]),
        ("hf://org/name", Repository({"README.md": b""}), None, "ModelNotFound", ["config.json"]),
        ("hf://org/name", Repository({"config.json": b"{}"}), None, "ModelNotFound", ["safetensors"]),
        ("hf://name", Repository(FILES), None, "ModelNotFound", ["hf://org/name"]),
        ("hf://org/na me", Repository(FILES), None, "ModelNotFound", ["no hub address"]),
    ],
)
def test_what_the_hub_refuses_becomes_a_sentence(name, repository, token, kind, words, tmp_path):
    with FakeHub({"org/name": repository}) as hub:
        error = resolve(name, tmp_path, hub.url, {"HF_TOKEN": token} if token else None)
    assert error["type"] == kind
    assert all(word in error["message"] for word in words)


def test_a_cache_that_cannot_be_written_is_a_matter_of_settings(tmp_path):
    (tmp_path / "file").write_text("")
    with FakeHub({"org/name": Repository(FILES)}) as hub:
        error = resolve("hf://org/name", tmp_path / "file" / "home", hub.url)
    assert error["type"] == "ConfigError"
    assert "HF_HOME" in error["message"]
