"""The content of a Messages answer, built from a turn's pieces: thinking, text and tool_use blocks.

    thought ─▶ thinking 0 │ text ─▶ text 1 │ call ─▶ tool_use 2 │ call ─▶ tool_use 3

A block begins with what does not fit into the one before, which ends then. `BlockEvents` writes the events
of a stream, `BlockList` collects the blocks of a whole answer. A thought's signature is made from the
answer's id, since clients expect one; nothing checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from leadline.engine.frontend.tool_formats import CallDelta, ParsedText
from leadline.engine.server.api.typed_events import EventWriter, TextTemplate
from leadline.protocol.anthropic.answers import (
    AnswerBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    SignatureDelta,
    TextDelta,
    ThinkingDelta,
)
from leadline.protocol.anthropic.content import TextBlock, ThinkingBlock, ToolUseBlock

__all__ = ["BlockEvents", "BlockList"]

_Part = tuple[str, str, CallDelta | None]
NameOf = Callable[[str], str]
"""Makes the name of a part of the answer, the same on every pod."""
_CUT = "INVALID_JSON"
"""Key of an input that is no JSON object, as Anthropic's documentation wraps one."""


class BlockList:
    """Collects whole blocks."""

    def __init__(self, name_of: NameOf, *, shows_thinking: bool) -> None:
        self._name_of = name_of
        self._shows_thinking = shows_thinking
        self._parts: list[tuple[str, list[str], CallDelta | None]] = []
        """Kind, texts and the beginning of a call, of each block."""

    def add(self, steps: Iterable[ParsedText]) -> None:
        """Add what is new."""
        for kind, text, call in _parts(steps, self._parts[-1][0] if self._parts else ""):
            if call is not None or not self._parts or self._parts[-1][0] != kind:
                self._parts.append((kind, [], call))
            self._parts[-1][1].append(text)

    def blocks(self) -> list[AnswerBlock]:
        """Return the blocks; the answer has ended."""
        return [self._block(index, *part) for index, part in enumerate(self._parts)]

    def _block(self, index: int, kind: str, texts: list[str], call: CallDelta | None) -> AnswerBlock:
        text = "".join(texts)
        if call is not None:
            return ToolUseBlock(id=_tool_id(call), name=call.name or "", input=_input(text))
        if kind == _THINKING:
            shown = text if self._shows_thinking else ""
            return ThinkingBlock(thinking=shown, signature=_signature(self._name_of, index))
        return TextBlock(text=text)


class BlockEvents:
    """Writes the events of blocks."""

    def __init__(self, writer: EventWriter, name_of: NameOf, *, shows_thinking: bool) -> None:
        self.text: TextTemplate | None = None
        """Of the event that adds text to the open block, where that is a text."""
        self._writer = writer
        self._name_of = name_of
        self._shows_thinking = shows_thinking
        self._index = 0
        self._open = ""
        """Kind of the open block; empty: none is open."""

    def add(self, steps: Iterable[ParsedText]) -> None:
        """Write what is new."""
        for kind, text, call in _parts(steps, self._open):
            if call is not None or self._open != kind:
                self.close()
                self._begin(kind, call)
            if text:
                self._extend(kind, text)

    def close(self) -> None:
        """End the open block, if there is one."""
        if not self._open:
            return
        if self._open == _THINKING:
            signature = SignatureDelta(signature=_signature(self._name_of, self._index))
            self._writer.add(ContentBlockDelta(index=self._index, delta=signature))
        self._writer.add(ContentBlockStop(index=self._index))
        self._index += 1
        self._open, self.text = "", None

    def _begin(self, kind: str, call: CallDelta | None) -> None:
        block: AnswerBlock
        if call is not None:
            block = ToolUseBlock(id=_tool_id(call), name=call.name or "", input={})
        elif kind == _THINKING:
            block = ThinkingBlock(thinking="", signature="")
        else:
            block = TextBlock(text="")
            example = ContentBlockDelta(index=self._index, delta=TextDelta(text=TextTemplate.TEXT))
            self.text = TextTemplate(example)
        self._open = kind
        self._writer.add(ContentBlockStart(index=self._index, content_block=block))

    def _extend(self, kind: str, text: str) -> None:
        if self.text is not None:
            self._writer.add_text(self.text, text)
        elif kind == _CALL:
            self._writer.add(ContentBlockDelta(index=self._index, delta=InputJsonDelta(partial_json=text)))
        elif self._shows_thinking:
            self._writer.add(ContentBlockDelta(index=self._index, delta=ThinkingDelta(thinking=text)))


_THINKING, _TEXT, _CALL = "thinking", "text", "tool_use"


def _parts(steps: Iterable[ParsedText], open_kind: str) -> list[_Part]:
    """(kind, text, the delta that begins a call) of what is new, in the order of the output."""
    parts: list[_Part] = []
    for step in steps:
        calls = step.calls
        if open_kind == _CALL and calls and calls[0].id is None:
            _join(parts, _CALL, calls[0].arguments)  # of the call that is open
            calls = calls[1:]
        if step.reasoning:
            _join(parts, _THINKING, step.reasoning)
        if step.content:
            _join(parts, _TEXT, step.content)
        for part in calls:
            if part.id is None:
                _join(parts, _CALL, part.arguments)
            else:
                parts.append((_CALL, part.arguments, part))
        if parts:
            open_kind = parts[-1][0]
    return parts


def _join(parts: list[_Part], kind: str, text: str) -> None:
    """Add text to the last part, or as a new one."""
    if parts and parts[-1][0] == kind:
        _, before, call = parts.pop()
        parts.append((kind, before + text, call))
    else:
        parts.append((kind, text, None))


def _tool_id(call: CallDelta) -> str:
    """The id of a call as this API writes it. A model's own id stays as it is."""
    call_id = call.id or ""
    return f"toolu_{call_id.removeprefix('call_')}" if call_id.startswith("call_") else call_id


def _signature(name_of: NameOf, index: int) -> str:
    return name_of(f"signature/{index}")


def _input(arguments: str) -> dict[str, object]:
    """The input of a call. Arguments that were cut or broken are kept as text."""
    try:
        value = msgspec.json.decode(arguments) if arguments.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {_CUT: arguments}
