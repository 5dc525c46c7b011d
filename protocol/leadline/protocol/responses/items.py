"""Items of `input` → messages of a chat.

    instructions, system, developer         the system message
    message of a user or an assistant       a message
    reasoning                               reasoning_content of the assistant's message behind it
    function_call                           a tool call of the assistant's message before it, or of a new one
    function_call_output                    a message of a tool

One Struct holds every type of item: the type may be missing (`{"role": …, "content": …}`), and an error can
name the item and its field.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from leadline.protocol.openai.body import InvalidBody
from leadline.protocol.openai.chat import (
    AssistantMessage,
    ChatMessage,
    DeveloperMessage,
    FunctionCall,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)

__all__ = ["ContentPart", "InputItem", "messages_of"]

_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_LONGEST_SHOWN = 64


class ContentPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of a content: `input_text`, `output_text`, `refusal`, `reasoning_text` or `summary_text`."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | list[ContentPart]


class InputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An item of `input`. `type` says which of the fields count."""

    type: str | None = None
    """message (also where it is missing and there is a role), function_call, function_call_output, reasoning
    or item_reference."""
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None
    """Not read: reasoning is in `content`."""

    @property
    def kind(self) -> str | None:
        """The type, also where it is left out."""
        if self.type is not None:
            return self.type
        return "message" if self.role is not None or self.id is None else "item_reference"


def messages_of(items: Sequence[InputItem], instructions: str | None) -> list[ChatMessage]:
    """Return the messages that `items` stand for. Raises InvalidBody, which names the item and its field."""
    conversation = _Conversation(instructions)
    for index, item in enumerate(items):
        conversation.add(item, f"input[{index}]")
    return conversation.messages()


class _Conversation:
    """Messages so far."""

    def __init__(self, instructions: str | None) -> None:
        self._system = [instructions] if instructions else []
        self._messages: list[ChatMessage] = []
        self._reasoning: list[str] = []
        self._calls: set[str] = set()

    def messages(self) -> list[ChatMessage]:
        system = [SystemMessage(content="\n\n".join(self._system))] if self._system else []
        return [*system, *self._messages]

    def add(self, item: InputItem, where: str) -> None:
        match item.kind:
            case "message":
                self._message(item, where)
            case "function_call":
                self._call(item, where)
            case "function_call_output":
                self._output(item, where)
            case "reasoning":
                parts = item.content or item.summary or []
                self._reasoning.append(_text(parts, f"{where}.content"))
            case "item_reference":
                raise InvalidBody(
                    f"{where} refers to an item that is not stored: send the item itself, as clients do with "
                    "store: false. Only a gateway whose setting responses.store_seconds is set stores "
                    "responses",
                    where,
                )
            case other:
                raise InvalidBody(
                    f"{where}.type is {_shown(other)}; this server takes message, function_call, "
                    "function_call_output and reasoning",
                    f"{where}.type",
                )

    def _message(self, item: InputItem, where: str) -> None:
        role = item.role
        if role not in ("user", "assistant", "system", "developer"):
            raise InvalidBody(
                f"{where}.role must be user, assistant, system or developer, got {_shown(role)}",
                f"{where}.role",
            )
        if item.content is None:
            raise InvalidBody(f"{where}.content is required", f"{where}.content")
        text = _text(item.content, f"{where}.content")
        if role == "assistant":
            self._messages.append(AssistantMessage(content=text, reasoning_content=self._thought()))
            return
        self._reasoning.clear()
        if role == "user":
            self._messages.append(UserMessage(content=text))
        elif not self._messages:
            # Many templates take one system message, and only at the beginning.
            self._system.append(text)
        elif role == "system":
            self._messages.append(SystemMessage(content=text))
        else:
            self._messages.append(DeveloperMessage(content=text))

    def _call(self, item: InputItem, where: str) -> None:
        for field in ("call_id", "name", "arguments"):
            if getattr(item, field) is None:
                raise InvalidBody(f"{where}.{field} is required", f"{where}.{field}")
        call_id, name, arguments = item.call_id or "", item.name or "", item.arguments or ""
        self._calls.add(call_id)
        last = self._messages[-1] if self._messages else None
        if not isinstance(last, AssistantMessage):
            last = AssistantMessage()
            self._messages.append(last)
        thoughts = filter(None, (last.reasoning_content, self._thought()))
        last.reasoning_content = "\n\n".join(thoughts) or None
        last.tool_calls = last.tool_calls or []
        last.tool_calls.append(ToolCall(id=call_id, function=FunctionCall(name=name, arguments=arguments)))

    def _output(self, item: InputItem, where: str) -> None:
        if item.call_id is None or item.call_id not in self._calls:
            raise InvalidBody(
                f"{where}.call_id is {_shown(item.call_id)}, but no function_call before it has this call_id",
                f"{where}.call_id",
            )
        if item.output is None:
            raise InvalidBody(f"{where}.output is required", f"{where}.output")
        text = _text(item.output, f"{where}.output")
        self._messages.append(ToolMessage(content=text, tool_call_id=item.call_id))

    def _thought(self) -> str | None:
        """Take the reasoning that has no message yet."""
        text = "\n\n".join(filter(None, self._reasoning))
        self._reasoning.clear()
        return text or None


def _text(content: Content, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in _TEXTS and part.type != "refusal":
            raise InvalidBody(
                f"{where}[{index}].type is {_shown(part.type)}, but this server takes text only: use "
                '{"type": "input_text", "text": "..."}',
                f"{where}[{index}].type",
            )
        if text is None:
            field = "refusal" if part.type == "refusal" else "text"
            raise InvalidBody(f"{where}[{index}].{field} is required", f"{where}[{index}].{field}")
        texts.append(text)
    return "\n".join(texts) if len(texts) > 1 else "".join(texts)


def _shown(value: str | None) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"
