"""Streams of every kind, recorded from a real engine and cut at every byte.

The engine answers each kind once, and once more for every point at which another pod may have to go on.
Then all cuts are played without a network: what a client got before the cut and what the continuation adds
must read as the answer that was never cut, and so it must when the continuation is cut again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from engines import Engine

from leadline.gateway.proxy.body import Incoming, read_incoming
from leadline.gateway.proxy.migration import MovableStream

FACT: dict[str, Any] = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
CHAT: dict[str, Any] = {**FACT, "max_tokens": 8, "temperature": 0}
TEXT: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
USAGE = {"stream_options": {"include_usage": True}}
PARIS = 7042
"""' Paris', which both answers say."""
ODD = "東🜚!😀"
TOOL = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"n": {"enum": [1, 20]}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}
CALL = r'<tool_call>\n\{"name": "pick", "arguments": \{"n": [12]\}\}\n</tool_call>'

KINDS: dict[str, dict[str, Any]] = {
    "chat": CHAT,
    "chat with usage": {**CHAT, **USAGE},
    "sampled chat": {**CHAT, "temperature": 1.0, "seed": 11},
    "chat with token ids": {**CHAT, **USAGE, "return_token_ids": True},
    "chat with logprobs": {**CHAT, "logprobs": True, "top_logprobs": 2},
    "chat to its end": {**CHAT, **USAGE, "max_tokens": 20},
    "chat with the end shown": {
        **CHAT,
        **USAGE,
        "max_tokens": 20,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    },
    "chat to its end with token ids": {**CHAT, **USAGE, "max_tokens": 20, "return_token_ids": True},
    "chat with a stop string": {**CHAT, **USAGE, "stop": " of France"},
    "chat with the stop string shown": {
        **CHAT,
        **USAGE,
        "stop": " of France",
        "include_stop_str_in_output": True,
    },
    "chat with a stop string and token ids": {**CHAT, "stop": " of France", "return_token_ids": True},
    "chat with a stop string within a token": {
        **CHAT,
        **USAGE,
        "stop": ["ran", "xyz"],
        "include_stop_str_in_output": True,
    },
    "chat with a stop token": {**CHAT, **USAGE, "stop_token_ids": [PARIS]},
    "chat with the stop token shown": {
        **CHAT,
        **USAGE,
        "stop_token_ids": [PARIS],
        "include_stop_str_in_output": True,
    },
    "chat with a stop token beyond min_tokens": {
        **CHAT,
        "max_tokens": 20,
        "stop_token_ids": [PARIS],
        "include_stop_str_in_output": True,
        "min_tokens": 7,
    },
    "odd characters": {**CHAT, **USAGE, "max_tokens": 40, "regex": ODD},
    "odd characters cut by length": {**CHAT, "max_tokens": 6, "regex": ODD},
    "odd characters with logprobs": {**CHAT, "max_tokens": 40, "regex": ODD, "logprobs": True},
    "a choice of two": {**CHAT, **USAGE, "max_tokens": 40, "regex": "yes|no", "temperature": 1.0},
    "JSON": {
        **CHAT,
        **USAGE,
        "max_tokens": 40,
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "n",
                "schema": {
                    "type": "object",
                    "properties": {"a": {"enum": ["é", 12]}},
                    "required": ["a"],
                    "additionalProperties": False,
                },
            },
        },
    },
    "a call that must be made": {
        **CHAT,
        **USAGE,
        "max_tokens": 60,
        "tools": [TOOL],
        "tool_choice": "required",
    },
    "a call of a tool by name": {
        **CHAT,
        "max_tokens": 60,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "pick"}},
    },
    "a call cut by length": {**CHAT, "max_tokens": 6, "tools": [TOOL], "tool_choice": "required"},
    "content and two calls": {
        **CHAT,
        **USAGE,
        "max_tokens": 120,
        "tools": [TOOL],
        "regex": rf"Look:\n{CALL}\n{CALL}",
    },
    "content and calls with logprobs": {
        **CHAT,
        "max_tokens": 120,
        "tools": [TOOL],
        "regex": rf"Look: {CALL} So\.",
        "logprobs": True,
    },
    "text": {**TEXT, **USAGE},
    "text of token ids": {**TEXT, "prompt": [504, 3575, 282, 4649, 314]},
    "text with a stop string": {**TEXT, **USAGE, "stop": ".", "return_token_ids": True},
    "text with the stop token shown": {
        **TEXT,
        "stop_token_ids": [PARIS],
        "include_stop_str_in_output": True,
        "return_token_ids": True,
    },
    "echoed text": {**TEXT, **USAGE, "echo": True},
    "a prompt that is echoed alone": {**TEXT, **USAGE, "echo": True, "max_tokens": 0},
    "an echoed prompt with logprobs": {**TEXT, "echo": True, "max_tokens": 0, "logprobs": 1},
    "echoed text with logprobs": {**TEXT, "echo": True, "logprobs": 1},
    "text with logprobs": {**TEXT, "logprobs": 1},
    "text with prompt logprobs": {**TEXT, **USAGE, "prompt_logprobs": 1, "stop": "."},
    "odd text with logprobs": {**TEXT, **USAGE, "max_tokens": 40, "regex": ODD, "logprobs": 1},
    "odd echoed text with logprobs": {
        **TEXT,
        "prompt": "Ja: 😀",
        "max_tokens": 40,
        "regex": ODD,
        "logprobs": 0,
        "echo": True,
    },
}


class Recorder:
    """One kind: its request as a gateway passes it on, and the engine's answers by resumed tokens."""

    def __init__(self, body: dict[str, Any]) -> None:
        chat = "messages" in body
        self.path = "/v1/chat/completions" if chat else "/v1/completions"
        self.body = {"model": "m", "stream": True, "seed": 5, **body}
        self.incoming: Incoming = read_incoming(json.dumps(self.body).encode(), chat)
        self.answers: dict[tuple[int, ...], bytes] = {}

    async def ask(self, client: httpx.AsyncClient, **more: object) -> bytes:
        got = await client.post(self.path, json={**self.body, **more})
        assert got.status_code == 200, got.text
        return got.content

    async def record(self, client: httpx.AsyncClient, points: Iterable[tuple[int, ...]]) -> None:
        new = [point for point in points if point not in self.answers]
        asked = [self.ask(client, return_token_ids=True, resume_token_ids=list(point)) for point in new]
        self.answers.update(zip(new, await asyncio.gather(*asked), strict=True))


def point_of(stream: MovableStream) -> tuple[int, ...]:
    return tuple(stream.resumption["resume_token_ids"])  # type: ignore[arg-type]


def ends_of_events(data: bytes) -> list[int]:
    found = [0]
    while (end := data.find(b"\n\n", found[-1])) >= 0:
        found.append(end + 2)
    return found


def told(data: bytes) -> dict[str, Any]:
    """What a client makes of a stream, whatever its cutting into chunks."""
    events = [event.removeprefix("data: ") for event in data.decode().split("\n\n") if event]
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert not any("error" in chunk for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [choice["delta"] for choice in choices if "delta" in choice]
    assert choices[-1]["finish_reason"]
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    for usage in usages:
        assert usage.pop("prompt_tokens_details")["cached_tokens"] <= usage["prompt_tokens"]
    calls: dict[int, dict[str, str]] = {}
    for part in [part for delta in deltas for part in delta.get("tool_calls") or ()]:
        call = calls.setdefault(part["index"], {"name": "", "arguments": "", "ids": ""})
        for key, value in part["function"].items():
            call[key] += value or ""
        call["ids"] += "." if part.get("id") else ""
    logprobs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    columns = ("tokens", "text_offset", "token_logprobs", "top_logprobs")
    return {
        "text": "".join(delta.get("content") or "" for delta in deltas)
        + "".join(choice.get("text", "") for choice in choices),
        "roles": [delta["role"] for delta in deltas if "role" in delta],
        "calls": calls,
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "stop_reason": [choice["stop_reason"] for choice in choices if "stop_reason" in choice],
        "usage": usages,
        "token_ids": [token for choice in choices for token in choice.get("token_ids", ())],
        "logprobs": [entry for part in logprobs for entry in part.get("content") or ()]
        + [row for part in logprobs for row in zip(*[part.get(name) or () for name in columns], strict=True)],
        "prompt_logprobs": [choice["prompt_logprobs"] for choice in choices if "prompt_logprobs" in choice],
    }


def same(one: Any, other: Any) -> bool:
    """Equal but for the last digits of log probabilities, which another batch rounds otherwise."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-3
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", KINDS)
async def test_a_stream_cut_at_any_byte_reads_as_one_that_is_not(engine: Engine, name: str) -> None:
    kind = Recorder(KINDS[name])
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as client:
        wanted = told(await kind.ask(client))
        await kind.record(client, [()])
        whole = kind.answers[()]
        points = every_byte(kind.incoming, whole)
        await kind.record(client, points)
    assert len(points) > 1 or "alone" in name or "with logprobs" in name
    uncut = MovableStream(kind.incoming)
    assert same(told(uncut.push(whole)), wanted)
    for end in ends_of_events(whole):
        stream = MovableStream(kind.incoming)
        sent = stream.push(whole[:end])
        if stream.done:
            continue
        again = kind.answers[point_of(stream)]
        assert same(told(sent + rest_of(stream, kind)), wanted), f"cut at byte {end}"
        # The continuation is cut as well.
        for second in ends_of_events(again):
            stream = MovableStream(kind.incoming)
            sent = stream.push(whole[:end])
            stream.resume()
            sent += stream.push(again[:second])
            if not stream.done:
                assert same(told(sent + rest_of(stream, kind)), wanted), f"cut at {end}, then {second}"


def every_byte(incoming: Incoming, whole: bytes) -> set[tuple[int, ...]]:
    """Where another pod goes on after a cut at each byte. Within an event nothing changes: a client has got,
    and the next pod is told, what was there at its beginning."""
    stream, ends = MovableStream(incoming), set(ends_of_events(whole))
    points = {point_of(stream)}
    for at in range(len(whole)):
        before = point_of(stream), stream.finished, stream.done
        sent = stream.push(whole[at : at + 1])
        assert stream.movable
        if at + 1 in ends:
            points.add(point_of(stream))
        else:
            assert (sent, before) == (b"", (point_of(stream), stream.finished, stream.done))
    assert stream.done
    return points


def rest_of(stream: MovableStream, kind: Recorder) -> bytes:
    """What the client gets after the pod was lost."""
    ending = stream.closing()
    if ending is not None:
        return ending
    fields = stream.resume()
    assert fields.keys() == {"resume_token_ids"}
    return stream.push(kind.answers[point_of(stream)])
