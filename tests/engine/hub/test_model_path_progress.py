"""`leadline model-path --progress-port`: what the init container of a pod says while it downloads."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import BinaryIO

from fake_hub import CONFIG, FakeHub, Repository

SIZE = 40_000_000
COMMAND = [sys.executable, "-m", "leadline.cli.main", "model-path"]


class SlowHub(FakeHub):
    """Sends half of the weights, and the rest when told to."""

    def __init__(self, repositories: dict[str, Repository]) -> None:
        super().__init__(repositories)
        self.go_on = threading.Event()

    def send(self, out: BinaryIO, path: str, body: bytes) -> None:
        half = len(body) // 2 if path.endswith(".safetensors") else 0
        out.write(body[:half])
        if half:
            self.go_on.wait(60)
        out.write(body[half:])


def environment(tmp_path: Path, hub: FakeHub) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return {**kept, "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url}


def get(port: int, path: str) -> tuple[int, dict[str, object]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_download_says_over_http_how_far_it_is_and_prints_steps(tmp_path: Path) -> None:
    files = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": os.urandom(SIZE)}
    port = free_port()
    with SlowHub({"org/name": Repository(files)}) as hub:
        process = subprocess.Popen(
            [*COMMAND, "hf://org/name", f"--progress-port={port}"],
            env=environment(tmp_path, hub),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            share, ends = 0.0, time.monotonic() + 60
            while share < 0.25:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < ends
                try:
                    status, body = get(port, "/ready")
                except OSError:  # it does not listen yet
                    time.sleep(0.05)
                    continue
                progress = body.get("progress") or {}
                share = progress.get("fraction") or 0.0
            assert (status, progress["phase"]) == (503, "downloading")
            assert share < 0.6
            assert progress["detail"].endswith(" of 0.04 GB")
            assert get(port, "/health")[0] == 200
        finally:
            hub.go_on.set()
            out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert (Path(out.strip()) / "model.safetensors").stat().st_size == SIZE
    lines = [line for line in err.splitlines() if line.startswith("leadline: hf://org/name: downloading: ")]
    assert lines[0].endswith("(0 %)")
    assert lines[-1].endswith("0.04 of 0.04 GB (100 %)")


def test_a_download_in_a_pod_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """By a way of its own: the first process of a container gets no signal whose default it left in place."""
    files = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": os.urandom(SIZE)}
    with SlowHub({"org/name": Repository(files)}) as hub:
        process = subprocess.Popen(
            [*COMMAND, "hf://org/name", f"--progress-port={free_port()}"],
            env=environment(tmp_path, hub),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stderr is not None
            assert any("downloading" in line for line in process.stderr)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 128 + signal.SIGTERM
        finally:
            hub.go_on.set()
            process.kill()
            process.communicate()


def test_a_port_that_is_taken_is_said_in_a_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*COMMAND, "smollm2", f"--progress-port={port}"], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr.startswith("leadline: ")
    assert len(done.stderr.splitlines()) == 1
