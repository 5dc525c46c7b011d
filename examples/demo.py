"""Starts two engines and the gateway on the demo model and shows what the gateway is for.

Run by `make demo`. Everything is real: `leadline up` with its processes, HTTP, the OpenAI client. It streams
one answer to standard output, then sends the same long prompt twice and a follow-up in that conversation,
and prints which engine answered, how much of the prompt it had cached, and how long the first token took.
Exits with 1 and a reason when an answer is empty, or when a prompt that one engine holds did not go there and
hit its cache. Whatever was started is ended however this script ends.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from openai import OpenAI, OpenAIError

REQUEST_TIMEOUT = 120.0
STOP_TIMEOUT = 20.0
PR_SET_PDEATHSIG = 1

FACTS = [
    ("Harbor", "the lead line is marked with leather, cloth and rope, so that a hand can read it at night"),
    ("Tides", "the ebb runs for six hours and a little more, and the moon, not the clock, decides when"),
    ("Anchors", "an anchor holds by the weight of the chain that lies on the bottom, more than by its own"),
    ("Fog", "a ship in fog goes no faster than lets it stop within half of what it can see"),
    ("Lights", "a lighthouse is known by its rhythm; the chart gives its colour, its period and its height"),
    (
        "Knots",
        "a good knot holds while it must and comes loose when it may; most do only one of the two",
    ),
]


class DemoFailed(Exception):
    """Something did not work; the message says what."""


@dataclass(slots=True)
class Answer:
    text: str
    pod: str
    prompt_tokens: int
    cached_tokens: int
    ttft: float
    """Seconds to the first piece of text."""
    total: float
    pieces: int
    tokens: int


def say(text: str = "") -> None:
    print(text, file=sys.stderr, flush=True)


def die_with_parent() -> None:
    """Ask Linux to end this (child) process when its parent dies, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def running(model: str, replicas: int) -> Iterator[str]:
    """`leadline up`, for as long as the context is open; yields its address. It ends its own children."""
    command = ["up", model, "--replicas", str(replicas), "--port", "0", "--drain-timeout", "3"]
    say(f"$ leadline {' '.join(command)}")
    process = subprocess.Popen(
        [sys.executable, "-m", "leadline.cli.main", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    assert process.stdout is not None
    try:
        # It prints one line when all is ready; its progress goes to standard error. The first start converts
        # the model, which takes a minute.
        found = re.search(r" at (http://\S+)", process.stdout.readline())
        if found is None:
            raise DemoFailed(f"leadline up ended with exit code {process.wait()} before it was ready")
        yield found[1]
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            say(f"leadline up did not stop within {STOP_TIMEOUT:.0f} s; killing it.")
            process.kill()
            process.wait()


def ask(client: OpenAI, model: str, messages: list[dict[str, str]], limit: int, *, show: bool) -> Answer:
    """One streamed chat answer, greedy; `show`: to standard output, piece by piece."""
    pieces: list[str] = []
    usage = None
    ttft = 0.0
    began = time.monotonic()
    response = client.chat.completions.with_raw_response.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=limit,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in response.parse():
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.delta.content:
                ttft = ttft or time.monotonic() - began
                pieces.append(choice.delta.content)
                if show:
                    print(choice.delta.content, end="", flush=True)
        if time.monotonic() - began > REQUEST_TIMEOUT:
            raise DemoFailed(f"the answer took longer than {REQUEST_TIMEOUT:.0f} s")
    total = time.monotonic() - began
    if show:
        print(flush=True)
    if not "".join(pieces).strip():
        raise DemoFailed("the answer is empty")
    if usage is None:
        raise DemoFailed("the answer came without its usage")
    details = usage.prompt_tokens_details
    return Answer(
        text="".join(pieces),
        pod=response.headers.get("x-leadline-pod", ""),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        ttft=ttft,
        total=total,
        pieces=len(pieces),
        tokens=usage.completion_tokens,
    )


def long_prompt() -> str:
    """About 1,300 tokens: a handbook, and a question on it."""
    lines = ["Handbook of the port."]
    for chapter in range(1, 7):
        for title, fact in FACTS:
            lines.append(f"{title}, rule {chapter}: {fact}, as chapter {chapter} explains.")
    return "\n".join(lines) + "\nIn one sentence: what is a lead line?"


def show_routing(client: OpenAI, model: str) -> None:
    """The same long prompt twice, then the conversation's next turn. Raises DemoFailed."""
    messages = [{"role": "user", "content": long_prompt()}]
    rows = [("a long prompt, cold", ask(client, model, messages, 24, show=False))]
    rows.append(("the same prompt again", ask(client, model, messages, 24, show=False)))
    messages += [
        {"role": "assistant", "content": rows[-1][1].text},
        {"role": "user", "content": "And how does an anchor hold?"},
    ]
    rows.append(("the conversation's next turn", ask(client, model, messages, 24, show=False)))
    say(f"\n{'request':<30}{'pod':<10}{'prompt tokens':>14}{'from cache':>12}{'first token':>13}{'all':>9}")
    for label, row in rows:
        counts = f"{row.prompt_tokens:>14,}{row.cached_tokens:>12,}"
        say(f"{label:<30}{row.pod:<10}{counts}{row.ttft * 1000:>10.0f} ms{row.total:>7.2f} s")
    cold = rows[0][1]
    for label, row in rows[1:]:
        if row.pod != cold.pod:
            raise DemoFailed(f"{label} went to {row.pod or 'an unnamed pod'}, not to the warm {cold.pod}")
        if row.cached_tokens < cold.prompt_tokens // 2:
            raise DemoFailed(f"{label} found only {row.cached_tokens} of its tokens in the cache")
    faster = cold.ttft / rows[1][1].ttft
    say(f"\nSent to the engine that held it, the prompt's first token came {faster:.0f}× sooner.")


def stop(signum: int, frame: FrameType | None) -> None:
    """A signal becomes an exception, so that `running` cleans up."""
    raise SystemExit(128 + signum)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--question", default="What is the capital of France?")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, stop)
    began = time.monotonic()
    try:
        with running(args.model, args.replicas) as url:
            say(f"Ready after {time.monotonic() - began:.0f} s: {url}")
            with OpenAI(
                base_url=f"{url}/v1", api_key="none", timeout=REQUEST_TIMEOUT, max_retries=0
            ) as client:
                model = client.models.list().data[0].id
                say(f"\n> {args.question}")
                answer = ask(client, model, [{"role": "user", "content": args.question}], 64, show=True)
                say(
                    f"\n{answer.tokens} tokens in {answer.pieces} pieces from {answer.pod}; first after "
                    f"{answer.ttft:.2f} s, all after {answer.total:.2f} s."
                )
                show_routing(client, model)
    except (DemoFailed, OpenAIError) as error:
        say(f"The demo failed: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    say(f"Done after {time.monotonic() - began:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
