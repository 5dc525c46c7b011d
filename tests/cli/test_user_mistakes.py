"""What a user gets wrong on the command line, or what goes wrong around it, ends in one line that says so."""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from leadline.cli.main import main
from leadline.engine.config import EngineConfig
from leadline.engine.errors import ConfigError

ROLE = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "The capital"}}]}\n\n'
ALL = ["chat", "warmup", "bench serve"]


@contextlib.contextmanager
def answering(answer: bytes, said: list[str] | None = None) -> Iterator[str]:
    """A server that sends these bytes and hangs up, whatever it is asked; but it lists a model. `said` gets
    the bodies of requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b'HTTP/1.1 200 OK\r\n\r\n{"data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if said is not None:
                said.append(body.decode())
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def complaint(capsys: pytest.CaptureFixture[str], command: str, *arguments: str) -> str:
    """The one line that a command which fails leaves on standard error."""
    prompt = () if command.startswith("bench") else ("--prompt", "Hi")
    assert main([*command.split(), *arguments, *prompt]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("leadline: ")
    assert "LEADLINE_DEBUG" not in line
    return line


@pytest.mark.parametrize("command", ALL)
@pytest.mark.parametrize("url", ["http://a:abc", "http://a:99999", "http://[::1", "ftp://a", ""])
def test_what_is_no_address_is_named(capsys: pytest.CaptureFixture[str], command: str, url: str) -> None:
    assert f"{url!r} is not an http:// or https:// address" in complaint(capsys, command, "--url", url)


@pytest.mark.parametrize("command", ALL)
@pytest.mark.parametrize("key", ["two\nlines", "kéy"])
def test_a_key_that_no_header_can_hold_is_refused(
    capsys: pytest.CaptureFixture[str], command: str, key: str
) -> None:
    line = complaint(capsys, command, "--url", "http://127.0.0.1:9", "--api-key", key)
    assert "the API key holds characters" in line
    assert key not in line


@pytest.mark.parametrize("command", ["warmup", "bench serve"])
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n<html>Welcome to nginx</html>", "what listens there?"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"hello": 1}', "what listens there?"),
        (b"-ERR unknown command\r\n", "speaks no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "broke off"),
    ],
)
def test_another_server_is_recognized(
    capsys: pytest.CaptureFixture[str], command: str, answer: bytes, says: str
) -> None:
    with answering(answer) as url:
        line = complaint(capsys, command, "--url", url)
    assert url in line
    assert says in line


@pytest.mark.parametrize("chunked", [False, True])
def test_chat_says_that_an_answer_is_not_complete(capsys: pytest.CaptureFixture[str], chunked: bool) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    if chunked:
        answer = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(ROLE), ROLE)
    else:
        answer = head + b"\r\n" + ROLE
    with answering(answer) as url:
        assert main(["chat", "--url", url, "--prompt", "Hi"]) == 1
    out, err = capsys.readouterr()
    assert out == "The capital\n"
    assert "before the answer was complete" in err


@pytest.mark.parametrize("piped", [False, True])
def test_chat_takes_text_of_another_encoding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, piped: bool
) -> None:
    said: list[str] = []
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    with answering(b"HTTP/1.1 200 OK\r\n\r\ndata: [DONE]\n\n", said) as url:
        prompt = [] if piped else ["--prompt", os.fsdecode(b"caf\xe9")]
        assert main(["chat", f"--url={url}", *prompt]) == 0
    assert [json.loads(body)["messages"][0]["content"] for body in said] == ["caf\ufffd"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("option", "value"), [("rate", "-1"), ("rate", "0"), ("rate", "nan"), ("prefix-tokens", "-5")]
)
def test_a_load_that_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    line = complaint(capsys, "bench serve", f"--{option}={value}", "--url", "http://127.0.0.1:9")
    assert f"--{option}" in line


@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_a_drain_takes_a_number_of_seconds(capsys: pytest.CaptureFixture[str], value: str) -> None:
    assert main(["serve", "smollm2", f"--drain-timeout={value}"]) == 1
    assert "drain_timeout must be a number of seconds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("queue_timeout", -1.0),
        ("queue_timeout", float("nan")),
        ("max_n", 0),
        ("max_logprobs", -1),
        ("max_model_len", 1),
        ("class_weights", {"interactive": float("nan"), "batch": 1.0}),
        ("class_weights", {"interactive": float("inf"), "batch": 1.0}),
    ],
)
def test_a_setting_that_would_refuse_every_request_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig(model="smollm2").replace(**{name: value}).validate()


def test_a_file_that_is_no_text_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.bin"
    file.write_bytes(b"\xff\xfe\x00")
    for arguments in (
        ("warmup", f"--file={file}"),
        ("serve", "smollm2", f"--warmup-file={file}"),
        ("serve", "smollm2", f"--api-key-file={file}"),
    ):
        assert main(arguments) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{file} is not text in UTF-8" in line
