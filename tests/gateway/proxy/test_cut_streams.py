"""Streams of every kind, recorded from a real engine and cut at every byte.

The engine answers each kind once, and once more for every point at which another pod may have to go on.
Then all cuts are played without a network: what a client got before the cut and what the continuation adds
must read as the answer that was never cut, and so it must when the continuation is cut again.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from typing import Any

import httpx
import msgspec
import pytest
from engines import Engine

from leadline.gateway.request.body import Incoming, read_incoming
from leadline.gateway.request.dialects import DIALECTS
from leadline.gateway.request.events import MovableEvents
from leadline.gateway.request.migration import MovableStream
from leadline.protocol.openai import ChatCompletionRequest, CompletionRequest

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Say something."}]}
CHAT: dict[str, Any] = {**ASK, "max_tokens": 8, "ignore_eos": True}
TEXT: dict[str, Any] = {"prompt": "Once upon a 🜚", "max_tokens": 6, "ignore_eos": True}
USAGE = {"stream_options": {"include_usage": True}}
ENDS = {"ignore_eos": False, "logit_bias": {"2": 9.0}, "max_tokens": 40}
"""The end of sequence comes soon."""
SHOWN = {"include_stop_str_in_output": True}
IDS = {"return_token_ids": True}
STRING, INSIDE, TOKEN = "string", "inside", "token"
"""Stops to be found in the answer: a token's text, a part of it, its id."""
ODD = "東🜚!😀"
TOOL = {
    "type": "function",
    "function": {
        "name": "go",
        "parameters": {
            "type": "object",
            "properties": {"n": {"enum": [1, 2]}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}
TOOLS = {"tools": [TOOL], "max_tokens": 80}
CALL = r'<tool_call>\{"name":"go"\}</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["é", 12]}},
    "required": ["a"],
    "additionalProperties": False,
}

KINDS: dict[str, dict[str, Any]] = {
    "chat": CHAT,
    "chat with usage": {**CHAT, **USAGE},
    "greedy chat": {**CHAT, "temperature": 0},
    "chat with token ids": {**CHAT, **USAGE, **IDS},
    "chat with logprobs": {**CHAT, "logprobs": True, "top_logprobs": 2},
    "chat to its end": {**CHAT, **USAGE, **ENDS},
    "chat with the end shown": {**CHAT, **USAGE, **ENDS, **SHOWN, "skip_special_tokens": False},
    "chat to its end with token ids": {**CHAT, **USAGE, **ENDS, **IDS},
    "chat with a stop string": {**CHAT, **USAGE, "stop": STRING},
    "chat with the stop string shown": {**CHAT, **USAGE, **SHOWN, "stop": STRING},
    "chat with a stop string and token ids": {**CHAT, **IDS, "stop": STRING},
    "chat with a stop string within a token": {**CHAT, **USAGE, **SHOWN, "stop": INSIDE},
    "chat with a stop token": {**CHAT, **USAGE, "stop_token_ids": TOKEN},
    "chat with the stop token shown": {**CHAT, **USAGE, **SHOWN, "stop_token_ids": TOKEN},
    "chat with a stop before min_tokens": {**CHAT, **SHOWN, "stop_token_ids": TOKEN, "min_tokens": 7},
    "odd characters": {**CHAT, **USAGE, "max_tokens": 40, "regex": ODD},
    "odd characters cut by length": {**CHAT, "max_tokens": 5, "regex": ODD},
    "odd characters with logprobs": {**CHAT, "max_tokens": 40, "regex": ODD, "logprobs": True},
    "a choice of two": {**CHAT, **USAGE, "max_tokens": 40, "regex": "yes|no"},
    "JSON": {
        **CHAT,
        **USAGE,
        "max_tokens": 80,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    },
    "a call that must be made": {**CHAT, **USAGE, **TOOLS, "tool_choice": "required"},
    "a call of a tool by name": {
        **CHAT,
        **TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "go"}},
    },
    "a call cut by length": {**CHAT, **TOOLS, "max_tokens": 6, "tool_choice": "required"},
    "content and two calls": {**CHAT, **USAGE, **TOOLS, "regex": f"Look: {CALL}{CALL}"},
    "content and calls with logprobs": {**CHAT, **TOOLS, "regex": f"So {CALL} on", "logprobs": True},
    "text": {**TEXT, **USAGE},
    "text of token ids": {**TEXT, "prompt": [504, 3575, 282, 4649, 314]},
    "text with a stop string": {**TEXT, **USAGE, **IDS, "stop": STRING},
    "text with the stop token shown": {**TEXT, **SHOWN, **IDS, "stop_token_ids": TOKEN},
    "echoed text": {**TEXT, **USAGE, "echo": True},
    "a prompt that is echoed alone": {**TEXT, **USAGE, "echo": True, "max_tokens": 0},
    "an echoed prompt with logprobs": {**TEXT, "echo": True, "max_tokens": 0, "logprobs": 1},
    "echoed text with logprobs": {**TEXT, "echo": True, "logprobs": 1},
    "text with logprobs": {**TEXT, "logprobs": 1},
    "text with prompt logprobs": {**TEXT, **USAGE, "prompt_logprobs": 1, "stop": STRING},
    "odd text with logprobs": {**TEXT, **USAGE, "max_tokens": 40, "regex": ODD, "logprobs": 1},
    "odd echoed text with logprobs": {**TEXT, "max_tokens": 40, "regex": ODD, "logprobs": 0, "echo": True},
}


class Recorder:
    """One kind: its request as a gateway passes it on, and the engine's answers by resumed tokens."""

    def __init__(self, body: dict[str, Any]) -> None:
        chat = "messages" in body
        self.path = "/v1/chat/completions" if chat else "/v1/completions"
        self.body = {"model": "m", "stream": True, "seed": 5, **body}
        self.incoming: Incoming = read_incoming(
            json.dumps(self.body).encode(), ChatCompletionRequest if chat else CompletionRequest
        )
        self.answers: dict[tuple[int, ...], bytes] = {}

    async def choose_stop(self, client: httpx.AsyncClient) -> None:
        """Put a stop in that the answer runs into, behind its second token."""
        asked = {key for key in ("stop", "stop_token_ids") if key in self.body}
        if not asked:
            return
        (key,) = asked
        how = self.body.pop(key)
        chunks = [json.loads(part[6:]) for part in (await self.ask(client, **IDS)).split(b"\n\n")[:-2]]
        parts = [choice for chunk in chunks for choice in chunk["choices"] if choice.get("token_ids")]
        texts = [part["delta"]["content"] if "delta" in part else part["text"] for part in parts]
        at = next(n for n in range(2, len(texts)) if len(texts[n]) > 2 and texts[n] not in "".join(texts[:n]))
        self.body[key] = {STRING: texts[at], INSIDE: texts[at][1:-1], TOKEN: parts[at]["token_ids"]}[how]
        self.incoming = read_incoming(json.dumps(self.body).encode(), self.incoming.kind)

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
    chunks = [msgspec.json.decode(event) for event in events[:-1]]
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
        await kind.choose_stop(client)
        wanted = told(await kind.ask(client))
        await kind.record(client, [()])
        whole = kind.answers[()]
        points = every_byte(kind.incoming, whole)
        await kind.record(client, points)
    assert len(points) > 1 or "alone" in name or "with logprobs" in name
    uncut = MovableStream(kind.incoming)
    assert same(told(uncut.push(whole)), wanted)
    ends = ends_of_events(whole)
    for number, end in enumerate(ends):
        stream = MovableStream(kind.incoming)
        sent = stream.push(whole[:end])
        if stream.done:
            continue
        again = kind.answers[point_of(stream)]
        assert same(told(sent + rest_of(stream, kind)), wanted), f"cut at byte {end}"
        if stream.attempts == 1 or (len(ends) > 20 and number % 4):
            continue
        # The continuation is cut as well: at its beginning, in its middle, and around its end.
        cuts = ends_of_events(again)
        for second in sorted({*cuts[:3], cuts[len(cuts) // 2], *cuts[-4:]}):
            stream = MovableStream(kind.incoming)
            sent = stream.push(whole[:end])
            stream.resume()
            sent += stream.push(again[:second])
            if not stream.done:
                assert same(told(sent + rest_of(stream, kind)), wanted), f"cut at {end}, then {second}"


FUNCTION = {"name": "go", "input_schema": TOOL["function"]["parameters"]}
MESSAGE: dict[str, Any] = {**ASK, "max_tokens": 8, "ignore_eos": True}
NAMED: dict[str, dict[str, Any]] = {
    "message": MESSAGE,
    "message of odd characters": {**MESSAGE, "max_tokens": 40, "regex": ODD},
    "message to its end": {**MESSAGE, **ENDS},
    "message with a stop sequence": {**MESSAGE, "max_tokens": 40, "regex": "yes|no", "stop_sequences": ["e"]},
    "message with a call that must be made": {
        **MESSAGE,
        "tools": [FUNCTION],
        "tool_choice": {"type": "any"},
        "max_tokens": 80,
    },
    "message with a call cut by length": {
        **MESSAGE,
        "tools": [FUNCTION],
        "tool_choice": {"type": "tool", "name": "go"},
        "max_tokens": 3,
    },
    "message with text between calls": {
        **MESSAGE,
        "tools": [FUNCTION],
        "max_tokens": 80,
        "regex": f"Look: {CALL} and {CALL}",
    },
}
"""Streams of named events."""


@pytest.mark.parametrize("name", NAMED)
async def test_a_stream_of_named_events_cut_at_any_event_has_the_same_bytes(
    engine: Engine, name: str
) -> None:
    identity = {"answer_id": "msg_1", "answer_created": 1, "return_token_ids": True}
    body = {"model": "m", "stream": True, "seed": 5, **identity, **NAMED[name]}
    answers: dict[tuple[int, ...], bytes] = {}

    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as client:

        async def ask(point: tuple[int, ...]) -> None:
            # No answer finds the prompt in the cache, which its usage would show.
            more = {"resume_token_ids": list(point), "cache_salt": f"{name} {point}"}
            got = await client.post("/v1/messages", json={**body, **more})
            assert got.status_code == 200, got.text
            answers[point] = got.content

        await ask(())
        whole = answers[()]
        ends = ends_of_events(whole)
        points = {continuation(MovableEvents(), whole[:end]) for end in ends}
        await asyncio.gather(*[ask(point) for point in points - {()}])
    wanted = MovableEvents().push(whole)
    assert wanted.startswith(b"event: message_start")
    assert wanted.endswith(b'data: {"type":"message_stop"}\n\n')
    assert len(points) > 2
    for end in ends:
        stream = MovableEvents()
        sent = stream.push(whole[:end])
        if stream.done:
            continue
        again = answers[continuation(stream, b"")]
        assert sent + stream.push(again) == wanted, f"cut at byte {end}"
        # The continuation is cut as well.
        for second in ends_of_events(again)[1::3]:
            stream = MovableEvents()
            sent = stream.push(whole[:end])
            stream.resume()
            sent += stream.push(again[:second])
            if not stream.done:
                sent += stream.push(answers[continuation(stream, b"")])
            assert sent == wanted, f"cut at {end}, then {second}"


def continuation(stream: MovableEvents, data: bytes) -> tuple[int, ...]:
    """Where another pod goes on when the stream is cut behind this data."""
    stream.push(data)
    return tuple(stream.resume()["resume_token_ids"])  # type: ignore[arg-type]


def every_byte(incoming: Incoming, whole: bytes) -> set[tuple[int, ...]]:
    """Where another pod goes on after a cut at each byte. Within an event nothing changes: a client has got,
    and the next pod learns, what was there at its beginning."""
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


EVENT_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "a response": ("/v1/responses", {"max_output_tokens": 6, "ignore_eos": True}),
    "a response to its end": ("/v1/responses", {**ENDS, "max_tokens": None, "max_output_tokens": 40}),
    "a response with odd characters": ("/v1/responses", {"max_output_tokens": 40, "regex": ODD}),
    "a response with text and two calls": (
        "/v1/responses",
        {"tools": [{"type": "function", **TOOL["function"]}], "regex": f"Look: {CALL}{CALL} on"},
    ),
    "a response that must call": (
        "/v1/responses",
        {
            "tools": [{"type": "function", **TOOL["function"]}],
            "tool_choice": "required",
            "max_output_tokens": 80,
        },
    ),
}
"""Path and body of streams of named events."""
ASKED = {"/v1/responses": {"input": "Say something."}}


@pytest.mark.parametrize("name", EVENT_KINDS)
async def test_a_stream_of_named_events_cut_anywhere_goes_on_with_the_same_bytes(
    engine: Engine, name: str
) -> None:
    path, fields = EVENT_KINDS[name]
    body = {"model": "m", "stream": True, "seed": 5, **ASKED[path], **fields}
    incoming = DIALECTS[path].read(json.dumps(body).encode())
    assert incoming.resumable
    body |= {"return_token_ids": True, **DIALECTS[path].identity()}

    async def ask(client: httpx.AsyncClient, more: dict[str, object]) -> bytes:
        got = await client.post(path, json={**body, **more})
        assert got.status_code == 200, got.text
        return got.content

    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as client:
        whole = await ask(client, {})
        cuts = []
        for end in ends_of_events(whole):
            stream = DIALECTS[path].moving(incoming)
            sent = stream.push(whole[:end])
            if not stream.done:
                cuts.append((stream, sent, stream.resume()))
        points = {json.dumps(more): more for _, _, more in cuts}
        answers = await asyncio.gather(*[ask(client, more) for more in points.values()])
        again = dict(zip(points, answers, strict=True))
    wanted = DIALECTS[path].moving(incoming).push(whole)
    assert len(cuts) > 5
    for stream, sent, more in cuts:
        got = sent + stream.push(again[json.dumps(more)])
        assert without_cached(got) == without_cached(wanted), more
        assert stream.done


def without_cached(data: bytes) -> bytes:
    """An answer but for how much of its prompt was cached."""
    return re.sub(rb'"(cached_tokens|cache_read_input_tokens)":[0-9]+', b"", data)
