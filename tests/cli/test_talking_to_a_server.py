"""`chat`, `warmup` and `bench serve` against a server that runs."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from leadline.cli.http import ServerError
from leadline.cli.warmup import run


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "leadline.cli.main", "serve", "smollm2", "--port=0", "--block-size=16"]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            [*command, "--max-model-len=512", "--cpu-threads=1", "--log-level=warning"], stdout=out
        )
        try:
            deadline = time.monotonic() + 120
            while not (match := re.search(r" at (http://\S+)", _read(out))):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield match[1]
        finally:
            process.terminate()
            process.wait(20)


def _read(file: object) -> str:
    file.seek(0)  # type: ignore[attr-defined]
    return file.read()  # type: ignore[attr-defined, no-any-return]


def leadline(*arguments: str, stdin: str = "") -> str:
    result = subprocess.run(
        [sys.executable, "-m", "leadline.cli.main", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_chat_prints_the_answer_to_a_prompt(url: str) -> None:
    answer = leadline(
        "chat",
        "--url",
        url,
        "--prompt",
        "What is the capital of France?",
        "--temperature",
        "0",
        "--max-tokens",
        "20",
    )
    assert answer == "The capital of France is Paris.\n"


def test_chat_reads_turns_from_standard_input(url: str) -> None:
    answers = leadline(
        "chat",
        "--url",
        url,
        "--temperature",
        "0",
        "--max-tokens",
        "12",
        stdin="What is the capital of France?\n\nAnd of Italy?\n",
    )
    assert answers.startswith("The capital of France is Paris.\n")
    assert len(answers.splitlines()) >= 2


def test_chat_starts_an_engine_of_its_own() -> None:
    answer = leadline(
        "chat",
        "smollm2",
        "--prompt",
        "What is the capital of France?",
        "--temperature",
        "0",
        "--max-tokens",
        "20",
    )
    assert answer == "The capital of France is Paris.\n"


def test_warmup_puts_prompts_into_the_cache(url: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text(
        "The first long prompt of the file, which goes on for a while.\nThe second one, also long.\n"
    )
    system = "You are a careful assistant who answers briefly and never makes anything up, whatever is asked."
    arguments = ("warmup", "--url", url, "--file", str(prompts), "--system", system)
    assert leadline(*arguments).startswith("3 prompts, ")
    assert "of which 0 were cached" not in leadline(*arguments)


def test_bench_serve_measures_a_server(url: str) -> None:
    result = json.loads(
        leadline(
            "bench", "serve", "--url", url, "--requests", "4", "--concurrency", "2", "--prompt-tokens", "20",
            "--output-tokens", "4", "--json",
        )
    )  # fmt: skip
    assert result["completed"] == 4
    assert result["failed"] == 0
    assert result["output_tokens"] == 16
    assert 0 < result["ttft_seconds"]["p50"] <= result["ttft_seconds"]["p99"] < 120
    assert result["itl_seconds"]["mean"] > 0
    assert result["output_tokens_per_second"] > 0


def test_bench_serve_measures_a_gateway_too(url: str) -> None:
    class Gateway(BaseHTTPRequestHandler):
        """In front of the server, without its /tokenize."""

        def do_GET(self) -> None:
            self._pass(None)

        def do_POST(self) -> None:
            self._pass(self.rfile.read(int(self.headers["content-length"])))

        def _pass(self, body: bytes | None) -> None:
            if self.path == "/tokenize":
                self.send_error(404)
                return
            with urllib.request.urlopen(urllib.request.Request(url + self.path, body)) as answer:
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n" + answer.read())

    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = json.loads(
            leadline(
                "bench", "serve", f"--url=http://127.0.0.1:{server.server_port}", "--requests=2",
                "--prompt-tokens=20", "--output-tokens=2", "--json",
            )
        )  # fmt: skip
        server.shutdown()
    assert result["completed"] == 2
    assert 30 < result["prompt_tokens"] < 60


def test_warmup_of_a_gateway_says_that_an_engine_is_meant() -> None:
    class Gateway(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "no such path: /admin/warmup"}}')

    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(ServerError, match="name an engine"):
            run(argparse.Namespace(url=url, api_key=None, prompt=["Hi"], system=[], file=None))
        server.shutdown()
