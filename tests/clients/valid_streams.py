"""Checks whole streams by the SDKs' own types: every event of each API."""

from __future__ import annotations

import json
from typing import Any

from anthropic.types import RawMessageStreamEvent
from openai.types.chat import ChatCompletionChunk
from pydantic import TypeAdapter
from recording_proxy import Exchange

from responses_reader import Reader

_MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def check_stream(exchange: Exchange) -> None:
    """Raise AssertionError or pydantic's ValidationError where an event is wrong or the end is missing."""
    if exchange.path.startswith("/v1/responses"):
        reader = Reader()
        reader.read(exchange.data)
        assert reader.response is not None, "no end"
    elif exchange.path.startswith("/v1/messages"):
        _check_messages(exchange.data)
    else:
        _check_chunks(exchange.data)


def _check_messages(data: bytes) -> None:
    kinds = []
    for block in data.decode().split("\n\n")[:-1]:
        name, payload = block.split("\n")
        event = json.loads(payload.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            _MESSAGE_EVENT.validate_python(event, strict=True)
        kinds.append(event["type"])
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") > 0


def _check_chunks(data: bytes) -> None:
    *blocks, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [
        ChatCompletionChunk.model_validate_json(block.removeprefix("data: "), strict=True) for block in blocks
    ]
    assert len({chunk.id for chunk in chunks}) == 1
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
