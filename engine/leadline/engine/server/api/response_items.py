"""The output items of one response, as the pieces of a turn come, and the events that say so.

    reasoning ─▶ message ─▶ function_call …        one item is open at a time; the next one closes it

Of one piece, more arguments of the open call come first, then reasoning, text and new calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from leadline.engine.frontend.tool_formats import CallDelta, ParsedText
from leadline.engine.server.api.typed_events import EventWriter, TextTemplate
from leadline.protocol.openai.answers import ChatTokenLogprob
from leadline.protocol.responses.objects import (
    ArgumentsDelta,
    ArgumentsDone,
    FunctionCallItem,
    ItemAdded,
    ItemDone,
    MessageItem,
    OutputItem,
    OutputText,
    PartAdded,
    PartDone,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    Status,
    TextDelta,
    TextDone,
)

__all__ = ["ResponseItems"]


class ResponseItems:
    """Items so far. Tells `writer` their events."""

    def __init__(self, writer: EventWriter, id_of: Callable[[str], str]) -> None:
        """`id_of`: makes the id of a part of the answer."""
        self.done: list[OutputItem] = []
        self._writer = writer
        self._id_of = id_of
        self._open: MessageItem | FunctionCallItem | ReasoningItem | None = None
        self._call = -1
        """Number of the open call."""
        self._texts: list[str] = []
        """Of the open item."""
        self._logprobs: list[ChatTokenLogprob] = []
        """Of the open message."""
        self._held: list[ChatTokenLogprob] = []
        """Of tokens that have brought no text yet."""
        self._template: TextTemplate | None = None
        """Template of the open item's events that have only text; None for calls."""

    @property
    def open_field(self) -> Literal["content", "reasoning"] | None:
        """To which output the open item belongs; None for calls."""
        if self._template is None:
            return None
        return "content" if isinstance(self._open, MessageItem) else "reasoning"

    def add(self, parsed: ParsedText, logprobs: Sequence[ChatTokenLogprob] = ()) -> None:
        """Add what a piece brings. `logprobs`: of its tokens."""
        fresh = parsed.calls
        while fresh and fresh[0].id is None and fresh[0].index == self._call:
            self._arguments(fresh[0].arguments)
            fresh = fresh[1:]
        if parsed.reasoning:
            self._reasoning(parsed.reasoning)
        self._held += logprobs
        if parsed.content:
            self._content(parsed.content)
        if parsed.calls or parsed.reasoning:
            self._held.clear()
        for part in fresh:
            self._begin_call(part)

    def text_event(
        self, field: Literal["content", "reasoning"], text: str, token_ids: Sequence[int]
    ) -> bytes:
        """Add text to a message or reasoning. Return its events and note."""
        if field != self.open_field or self._template is None:
            self.add(ParsedText(text) if field == "content" else ParsedText(reasoning=text))
            self._writer.tokens(token_ids)
            return self._writer.take()
        self._texts.append(text)
        return self._writer.text_event(self._template, text, token_ids)

    def finish(self, *, cut: bool) -> None:
        """Close the open item. `cut`: the output ended within it. A response without output gets an empty
        message."""
        if self._open is None and not self.done:
            self._open_message()
        self._close("incomplete" if cut else "completed")

    def _reasoning(self, text: str) -> None:
        item = self._open
        if not isinstance(item, ReasoningItem):
            self._close("completed")
            item = self._open = ReasoningItem(id=self._new_id("rs_"), status="in_progress")
            self._template = TextTemplate(
                ReasoningTextDelta(item_id=item.id, output_index=self._index, delta=TextTemplate.TEXT)
            )
            self._added(item, ReasoningText(text=""))
        assert self._template is not None
        self._texts.append(text)
        self._writer.add_text(self._template, text)

    def _content(self, text: str) -> None:
        if not isinstance(self._open, MessageItem):
            self._close("completed")
            self._open_message()
        assert self._open is not None
        assert self._template is not None
        self._texts.append(text)
        if not self._held:
            self._writer.add_text(self._template, text)
            return
        delta = TextDelta(
            item_id=self._open.id, output_index=self._index, delta=text, logprobs=self._held.copy()
        )
        self._writer.add(delta)
        self._logprobs += self._held
        self._held.clear()

    def _open_message(self) -> None:
        item = self._open = MessageItem(id=self._new_id("msg_"), status="in_progress")
        example = TextDelta(item_id=item.id, output_index=self._index, delta=TextTemplate.TEXT)
        self._template = TextTemplate(example)
        self._added(item, OutputText(text=""))

    def _begin_call(self, part: CallDelta) -> None:
        if part.id is not None and part.name is not None:
            self._close("completed")
            self._call = part.index
            self._open = FunctionCallItem(
                id=self._new_id("fc_"),
                status="in_progress",
                call_id=part.id,
                name=part.name,
                arguments="",
            )
            self._writer.add(ItemAdded(output_index=self._index, item=self._open))
        self._arguments(part.arguments)

    def _arguments(self, text: str) -> None:
        if text and isinstance(self._open, FunctionCallItem):
            self._texts.append(text)
            self._writer.add(ArgumentsDelta(item_id=self._open.id, output_index=self._index, delta=text))

    def _added(self, item: OutputItem, part: OutputText | ReasoningText) -> None:
        # A copy: the item is filled in when it is closed.
        self._writer.add(ItemAdded(output_index=self._index, item=msgspec.structs.replace(item)))
        self._writer.add(PartAdded(item_id=item.id, output_index=self._index, part=part))

    def _close(self, status: Status) -> None:
        item, index, write = self._open, self._index, self._writer.add
        if item is None:
            return
        text = "".join(self._texts)
        item.status = status
        part: OutputText | ReasoningText
        if isinstance(item, FunctionCallItem):
            item.arguments = text
            write(ArgumentsDone(item_id=item.id, output_index=index, arguments=text))
        elif isinstance(item, MessageItem):
            part = OutputText(text=text, logprobs=self._logprobs)
            item.content = [part]
            write(TextDone(item_id=item.id, output_index=index, text=text, logprobs=self._logprobs))
            write(PartDone(item_id=item.id, output_index=index, part=part))
        else:
            part = ReasoningText(text=text)
            item.content = [part]
            write(ReasoningTextDone(item_id=item.id, output_index=index, text=text))
            write(PartDone(item_id=item.id, output_index=index, part=part))
        write(ItemDone(output_index=index, item=item))
        self.done.append(item)
        self._open, self._call, self._texts, self._logprobs = None, -1, [], []
        self._template = None

    @property
    def _index(self) -> int:
        """Of the open item."""
        return len(self.done)

    def _new_id(self, prefix: str) -> str:
        return prefix + self._id_of(f"item/{len(self.done)}")
