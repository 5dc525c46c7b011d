"""The `leadline` command as a user types it, without a model."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from leadline.engine.config import EngineConfig


def leadline(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "leadline.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("command", ["serve smollm2", "gateway", "operator", "up smollm2"])
def test_a_server_that_is_told_to_stop_while_it_imports_ends_at_once(command: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "leadline.cli.main", *command.split()], stderr=subprocess.PIPE, text=True
    )
    status = Path(f"/proc/{process.pid}/status")
    while not _catches(status.read_text(), signal.SIGTERM):  # as soon as it can be told
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    try:
        _, words = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 143
    assert "Traceback" not in words


def _catches(status: str, number: int) -> bool:
    caught = re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def test_help_lists_the_commands() -> None:
    result = leadline("--help")
    assert result.returncode == 0
    for command in ("serve", "chat", "warmup", "size", "model-path", "bench"):
        assert command in result.stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from leadline.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'fastapi', 'zmq', 'numpy', 'asyncio'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "[]"


def test_help_is_there_at_once() -> None:
    def seconds(*command: str) -> float:
        began = time.monotonic()
        subprocess.run([sys.executable, *command], capture_output=True, timeout=60, check=True)
        return time.monotonic() - began

    # Against a bare interpreter, so that a busy machine slows down both.
    bare = min(seconds("-c", "pass") for _ in range(5))
    assert min(seconds("-m", "leadline.cli.main", "--help") for _ in range(5)) - bare < 0.3


def test_version_is_the_packages() -> None:
    assert leadline("--version").stdout == f"leadline {version('leadline')}\n"


def test_no_command_is_a_usage_error() -> None:
    result = leadline()
    assert result.returncode == 2
    assert "serve" in result.stdout


def test_an_unknown_command_is_a_usage_error() -> None:
    result = leadline("fly")
    assert result.returncode == 2
    assert "fly" in result.stderr


def test_serve_has_a_described_option_for_every_engine_setting() -> None:
    text = " ".join(leadline("serve", "--help", COLUMNS="300").stdout.split())
    for field in dataclasses.fields(EngineConfig):
        if field.name == "model":
            continue
        option = "--" + field.name.replace("_", "-")
        described = re.findall(rf" {option}(?:, --no-\S+)? (?!\[)(.*?)(?= --[a-z]|$)", text)
        assert described, option
        assert len(described[-1].split()) > 3, f"{option} has no help text"


def test_every_setting_of_the_engine_is_read_by_it() -> None:
    files = Path(inspect.getfile(EngineConfig)).parent.rglob("*.py")
    text = "".join(file.read_text() for file in files if file.name != "config.py")
    settings = [field.name for field in dataclasses.fields(EngineConfig)]
    assert [name for name in settings if not re.search(rf'(config\.|"){name}\b', text)] == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("serve", "smollm2", "--block-size", "7"), "block_size must be 16, 32, 64, 128 or 256, not 7"),
        (("serve", "smollm2", "--port", "99999"), "port must lie between 0 and 65535"),
        (("serve", "smollm2", "--class-weights", "interactive=1"), "class_weights needs"),
        (("serve", "smollm2", "--api-key-file", "/nowhere/keys"), "/nowhere/keys"),
        (("model-path", "no-such-model"), "no-such-model"),
        (("model-path", "hf://"), "hf://"),
        (("size", "smollm2", "--gpu", "abacus"), "--gpu 'abacus' is not known; use h200"),
        (("size", "smollm2", "--tp", "10"), "--tp 10 is more than the model's 9 attention heads"),
        (("chat", "--url", "http://127.0.0.1:9", "--prompt", "Hi"), "cannot reach http://127.0.0.1:9"),
        (("chat", "--url", "ftp://somewhere", "--prompt", "Hi"), "ftp://somewhere"),
        (("warmup",), "nothing to warm up"),
        (("warmup", "--url", "http://127.0.0.1:9", "--prompt", "Hi"), "cannot reach"),
        (("bench", "serve", "--url", "http://127.0.0.1:9"), "cannot reach"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(arguments: tuple[str, ...], complaint: str) -> None:
    result = leadline(*arguments)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("leadline: ")
    assert complaint in line


def test_a_value_of_the_wrong_type_is_a_usage_error() -> None:
    result = leadline("serve", "smollm2", "--max-model-len", "long")
    assert result.returncode == 2
    assert "--max-model-len" in result.stderr


def test_leadline_debug_shows_the_traceback() -> None:
    result = leadline("model-path", "no-such-model", LEADLINE_DEBUG="1")
    assert "Traceback" in result.stderr


def test_model_path_prints_a_folder_with_a_model() -> None:
    result = leadline("model-path", "smollm2")
    assert result.returncode == 0
    assert os.path.isfile(os.path.join(result.stdout.strip(), "config.json"))


def test_size_says_what_fits_and_what_would() -> None:
    fits = leadline("size", "smollm2", "--gpu", "22.5")
    assert fits.returncode == 0
    assert "0.13 B parameters" in fits.stdout
    assert fits.stdout.splitlines()[-1].startswith("fits: ")
    small = leadline("size", "smollm2", "--gpu", "4.6", "--json")
    assert small.returncode == 1
    report = json.loads(small.stdout)
    assert 0 < report["kv_tokens"] < report["max_model_len"] == 8192
    words = leadline("size", "smollm2", "--gpu", "4.6").stdout.splitlines()[-1]
    assert words.startswith("it fits with --tp 2 or --quantization fp8 or --kv-cache-dtype fp8 or ")
    assert words.endswith(f" --max-model-len {report['kv_tokens']}")


def test_a_gateway_without_access_to_kubernetes_says_so_in_a_line(tmp_path) -> None:
    nowhere = {"HOME": str(tmp_path), "KUBECONFIG": "", "KUBERNETES_SERVICE_HOST": ""}
    for workers in ("1", "2"):
        result = leadline("gateway", "--kubernetes", "--port=0", f"--workers={workers}", **nowhere)
        assert result.returncode != 0
        assert "no service account in this place" in result.stderr
        assert len(result.stderr.splitlines()) == 1, result.stderr
