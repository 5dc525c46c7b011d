"""Starts the engine on the demo model, asks a question with the OpenAI client, prints the answer as it comes.

Run by `make demo`. Everything is real: `leadline serve` in a process of its own, HTTP, server-sent events.
Exits with 1 and a reason when no answer came. The server is ended however this script ends.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from types import FrameType

from openai import OpenAI, OpenAIError

READY_TIMEOUT = 900.0
"""Seconds; the first start converts the model."""
ANSWER_TIMEOUT = 300.0
STOP_TIMEOUT = 15.0
PR_SET_PDEATHSIG = 1


class DemoFailed(Exception):
    """Something did not work; the message says what."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def die_with_parent() -> None:
    """Ask Linux to end this (child) process when its parent dies, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def server(model: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """`leadline serve` in a process group of its own, whose whole group is gone at the end."""
    command = [sys.executable, "-m", "leadline.cli.main", "serve", model, "--port", str(port)]
    command += ["--log-level", "warning"]
    say(f"$ leadline {' '.join(command[3:])}")
    # The server's own output goes to stderr, so that stdout holds the answer and nothing else.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            say(f"The server did not stop within {STOP_TIMEOUT:.0f} s; killing it.")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(url: str) -> bool:
    """Whether GET `url` gives 200 now; no connection and 503 both mean "not yet"."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    start = time.monotonic()
    next_note = 5.0
    while True:
        waited = time.monotonic() - start
        if process.poll() is not None:
            raise DemoFailed(f"the server ended with exit code {process.returncode} before it was ready")
        if answers(f"{url}/ready"):
            say(f"Ready after {waited:.0f} s.")
            return
        if waited > READY_TIMEOUT:
            raise DemoFailed(f"the server was not ready after {READY_TIMEOUT:.0f} s")
        if waited >= next_note:
            say(f"Waiting for the model: {waited:.0f} s")
            next_note = waited + 5.0
        time.sleep(0.2)


def ask(url: str, model: str, question: str) -> str:
    """Stream one answer to stdout, piece by piece; returns all of it."""
    say(f"\n> {question}")
    pieces: list[str] = []
    cached: int | None = None
    tokens = 0
    start = time.monotonic()
    first: float | None = None
    with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=ANSWER_TIMEOUT, max_retries=0) as client:
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            max_tokens=64,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
                details = chunk.usage.prompt_tokens_details
                cached = details.cached_tokens if details else None
            for choice in chunk.choices:
                if choice.delta.content:
                    if first is None:
                        first = time.monotonic() - start
                    pieces.append(choice.delta.content)
                    print(choice.delta.content, end="", flush=True)
            if time.monotonic() - start > ANSWER_TIMEOUT:
                raise DemoFailed(f"the answer took longer than {ANSWER_TIMEOUT:.0f} s")
    print(flush=True)
    total = time.monotonic() - start
    if not "".join(pieces).strip() or first is None:
        raise DemoFailed("the server sent an empty answer")
    say(
        f"\n{tokens} tokens in {len(pieces)} pieces; first after {first:.2f} s, all after {total:.2f} s; "
        f"{cached or 0} prompt tokens came from the cache."
    )
    return "".join(pieces)


def stop(signum: int, frame: FrameType | None) -> None:
    """A signal becomes an exception, so that `server` cleans up."""
    raise SystemExit(128 + signum)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--question", default="What is the capital of France?")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, stop)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    try:
        with server(args.model, port) as process:
            wait_until_ready(process, url)
            ask(url, args.model, args.question)
    except (DemoFailed, OpenAIError) as error:
        say(f"The demo failed: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
