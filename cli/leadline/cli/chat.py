"""`leadline chat`: a conversation in the terminal, with a running server (`--url`) or one started for it.

The answer is printed as it streams. Without `--prompt` it reads turns from standard input until end of file.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from leadline.cli.http import Server, ServerError

__all__ = ["add_arguments", "run", "spawned_server"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help="model to talk to; started here unless --url is given (default: smollm2)"
    )
    parser.add_argument("--url", help="address of a running server, e.g. http://127.0.0.1:8000")
    parser.add_argument("--prompt", help="say this, print the answer and leave")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of one answer")
    parser.add_argument("--temperature", type=float, metavar="X", help="sampling temperature; 0 is greedy")
    parser.add_argument(
        "--api-key", help="API key of the server (default: the environment variable LEADLINE_API_KEY)"
    )


def run(args: argparse.Namespace) -> int:
    key = args.api_key or os.environ.get("LEADLINE_API_KEY")
    if args.url is not None:
        return _converse(Server(args.url, api_key=key), args)
    with spawned_server(args.model or "smollm2") as url:
        return _converse(Server(url), args)


def _converse(server: Server, args: argparse.Namespace) -> int:
    model = args.model if args.url and args.model else server.model()
    messages: list[dict[str, str]] = []
    if args.system:
        messages.append({"role": "system", "content": _utf8(args.system)})
    if args.prompt is not None:
        messages.append({"role": "user", "content": _utf8(args.prompt)})
        _answer(server, model, messages, args)
        return 0
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"Talking to {model} at {server.url}. Ctrl-D leaves.", file=sys.stderr)
    while True:
        if interactive:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return 0
        if not line.strip():
            continue
        messages.append({"role": "user", "content": _utf8(line.strip())})
        messages.append({"role": "assistant", "content": _answer(server, model, messages, args)})


def _utf8(text: str) -> str:
    """Without what is no text, as of a file in another encoding: JSON cannot hold it."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _answer(server: Server, model: str, messages: list[dict[str, str]], args: argparse.Namespace) -> str:
    body: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
    if args.max_tokens is not None:
        body["max_tokens"] = args.max_tokens
    if args.temperature is not None:
        body["temperature"] = args.temperature
    parts: list[str] = []
    try:
        for event in server.stream("/v1/chat/completions", body):
            for choice in event["choices"]:
                text = choice["delta"].get("content")
                if text:
                    parts.append(text)
                    print(text, end="", flush=True)
    except BaseException:
        if parts:
            print(flush=True)  # the next output, ours or a shell's, begins a new line
        raise
    print()
    return "".join(parts)


@contextlib.contextmanager
def spawned_server(model: str) -> Iterator[str]:
    """Run `leadline serve MODEL` on a free port of this machine; yields its address, stops it at the end."""
    command = [
        sys.executable,
        "-m",
        "leadline.cli.main",
        "serve",
        model,
        "--port",
        "0",
        "--log-level",
        "warning",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = None
        for line in process.stdout:
            if " at http://" in line:
                url = line.rsplit(" at ", 1)[1].strip()
                break
        if url is None:
            raise ServerError(f"the server for {model!r} did not start (exit code {process.wait()})")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
