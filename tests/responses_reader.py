"""A strict client of streams of responses: each event by the SDK's own types, and in the specified order."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

__all__ = ["Reader"]

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@dataclass
class Reader:
    """A strict client: raises where an event is not due."""

    items: list[dict[str, Any]] = field(default_factory=list)
    open: dict[str, Any] | None = None
    part: dict[str, Any] | None = None
    text: str | None = None
    """Of the open part or arguments; None once they are done."""
    number: int = 0
    response: dict[str, Any] | None = None
    """The whole answer, once it has come."""

    def read(self, data: bytes) -> None:
        for block in data.decode().split("\n\n")[:-1]:
            name, payload = block.split("\n")
            event = json.loads(payload.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            EVENT.validate_json(payload.removeprefix("data: "), strict=True)
            assert event["sequence_number"] == self.number
            self.number += 1
            self.take(event)

    def take(self, event: dict[str, Any]) -> None:
        kind = event["type"].removeprefix("response.")
        if kind in ("created", "in_progress", "completed", "incomplete", "failed"):
            self.respond(kind, event["response"])
            return
        assert event["output_index"] == len(self.items)
        if kind == "output_item.added":
            assert self.open is None
            self.open, self.part = event["item"], None
            assert self.open["status"] == "in_progress"
            assert not self.open.get("content")
            self.text = "" if self.open["type"] == "function_call" else None
            return
        assert self.open is not None
        if kind == "output_item.done":
            assert self.text is None
            item = event["item"]
            assert item["id"] == self.open["id"]
            if item["type"] != "function_call":
                assert item["content"] == [self.part]
            self.items.append(item)
            self.open = None
            return
        assert event["item_id"] == self.open["id"]
        if kind == "content_part.added":
            assert self.part is None
            self.part, self.text = event["part"], ""
        elif kind == "content_part.done":
            assert self.text is None
            self.part = event["part"]
        elif kind.endswith(".delta"):
            assert event["delta"]
            assert self.text is not None
            self.text += event["delta"]
        else:
            field = "arguments" if "arguments" in kind else "text"
            assert event[field] == self.text
            self.text = None

    def respond(self, kind: str, response: dict[str, Any]) -> None:
        assert self.response is None, "an event behind the end"
        assert self.open is None
        if kind in ("created", "in_progress"):
            assert self.number == (1 if kind == "created" else 2)
            assert (response["status"], response["output"], response["usage"]) == ("in_progress", [], None)
            return
        assert response["status"] == kind
        assert response["output"] == self.items
        self.response = response
