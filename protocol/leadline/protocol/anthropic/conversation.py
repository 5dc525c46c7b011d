"""Messages of a request → messages of a chat.

    user [tool_result, tool_result, text]           ▶ tool, tool, user
    assistant [thinking, text, tool_use]            ▶ assistant with reasoning_content, content and tool_calls
    two messages of the same role                   ▶ one
    assistant as the last message                   ▶ the text that the answer continues

Checks that need no model: contents are not empty, blocks are in messages of their role, each tool_result
answers a tool_use of the message before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from leadline.protocol.anthropic import content as blocks
from leadline.protocol.anthropic.content import (
    Block,
    Content,
    Message,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from leadline.protocol.openai.body import InvalidBody
from leadline.protocol.openai.chat import (
    AssistantMessage,
    ChatMessage,
    FunctionCall,
    RefusalPart,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolMessage,
    UserMessage,
)

__all__ = ["Conversation", "chat_messages"]

_ROLE_OF = {blocks.UserTurn: "user", blocks.AssistantTurn: "assistant", blocks.SystemTurn: "system"}
_ALLOWED: dict[str, tuple[type[Block], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ToolUseBlock, ThinkingBlock, RedactedThinkingBlock),
    "system": (TextBlock,),
}
_BILLING = "x-anthropic-billing-header:"
"""Begins a block of the system prompt in which Claude Code puts a header. It differs from request to request,
so that no prefix behind it could be cached."""
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Conversation:
    """Messages of a chat."""

    messages: list[ChatMessage]
    continues: bool
    """The answer continues the last message."""


@dataclass(slots=True)
class _Turn:
    """Consecutive messages of one role."""

    role: str
    blocks: list[tuple[str, Block]] = field(default_factory=list)
    """With the path of each in the request."""

    @property
    def texts(self) -> list[str]:
        return [block.text for _, block in self.blocks if isinstance(block, TextBlock)]

    @property
    def thoughts(self) -> list[str]:
        return [block.thinking for _, block in self.blocks if isinstance(block, ThinkingBlock)]

    @property
    def calls(self) -> list[ToolUseBlock]:
        return [block for _, block in self.blocks if isinstance(block, ToolUseBlock)]


def chat_messages(
    system: str | Sequence[TextBlock] | None,
    messages: Sequence[Message],
    *,
    thinking_turns: int | None = None,
) -> Conversation:
    """Return the chat that a request stands for. Raises InvalidBody naming the message or block.

    `thinking_turns`: only the last so many turns with thoughts keep them; None: all do.
    """
    turns = _turns(system, messages)
    if not any(turn.role != "system" and turn.blocks for turn in turns):
        raise InvalidBody("messages must hold at least one message with content", "messages")
    _check_calls(turns)
    thinking = [turn for turn in turns if turn.thoughts]
    if thinking_turns is not None:
        thinking = thinking[len(thinking) - min(thinking_turns, len(thinking)) :]
    made: list[ChatMessage] = []
    for turn in turns:
        if turn.role == "assistant":
            made += _assistant(turn, any(turn is other for other in thinking))
        else:
            made += _others(turn)
    continues = turns[-1].role == "assistant" and bool(made) and isinstance(made[-1], AssistantMessage)
    return Conversation(made, continues)


def _turns(system: str | Sequence[TextBlock] | None, messages: Sequence[Message]) -> list[_Turn]:
    turns: list[_Turn] = []
    if system:
        given = [TextBlock(text=system)] if isinstance(system, str) else system
        kept = [block for block in given if block.text and not block.text.startswith(_BILLING)]
        if kept:
            turns.append(_Turn("system", [("system", block) for block in kept]))
    for index, message in enumerate(messages):
        role, where = _ROLE_OF[type(message)], f"messages[{index}]"
        found = _blocks(message.content, f"{where}.content", role, index == len(messages) - 1)
        if turns and turns[-1].role == role:
            turns[-1].blocks += found
        else:
            turns.append(_Turn(role, found))
    return turns


def _blocks(content: Content, where: str, role: str, last: bool) -> list[tuple[str, Block]]:
    """The blocks of one message, with their paths. Raises InvalidBody."""
    if not content:
        if last and role == "assistant":
            return []
        raise InvalidBody(f"{where} must not be empty", where)
    if isinstance(content, str):
        return [(where, TextBlock(text=content))]
    found: list[tuple[str, Block]] = []
    for index, block in enumerate(content):
        at = f"{where}[{index}]"
        if not isinstance(block, _ALLOWED[role]):
            name = block.__struct_config__.tag
            raise InvalidBody(f"{at}.type is {name!r}, which no message of the role {role!r} has", at)
        if isinstance(block, TextBlock) and not block.text:
            raise InvalidBody(f"{at}.text must not be empty", f"{at}.text")
        found.append((at, block))
    return found


def _check_calls(turns: list[_Turn]) -> None:
    """Check that each tool_result answers a tool_use of the message before, once. Raises InvalidBody."""
    open_calls: set[str] = set()
    seen: set[str] = set()
    for turn in turns:
        if turn.role == "system":
            continue
        for where, block in turn.blocks:
            if isinstance(block, ToolResultBlock):
                if block.tool_use_id not in open_calls:
                    raise InvalidBody(
                        f"{where}.tool_use_id is no id of a tool_use in the message before, or has a "
                        "tool_result already",
                        f"{where}.tool_use_id",
                    )
                open_calls.remove(block.tool_use_id)
            elif isinstance(block, ToolUseBlock):
                if block.id in seen:
                    raise InvalidBody(f"{where}.id is the id of an earlier tool_use as well", f"{where}.id")
                seen.add(block.id)
        open_calls = {call.id for call in turn.calls}
    if open_calls and turns[-1].role == "assistant":
        where = next(path for path, block in turns[-1].blocks if isinstance(block, ToolUseBlock))
        raise InvalidBody(f"{where} is a tool_use without a tool_result in a message behind it", where)


def _assistant(turn: _Turn, with_thoughts: bool) -> list[ChatMessage]:
    calls = [
        ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=_encode(call.input).decode()))
        for call in turn.calls
    ]
    thoughts = turn.thoughts if with_thoughts else []
    if not (calls or thoughts or turn.texts):
        return []
    parts: list[TextPart | RefusalPart] = [TextPart(text=text) for text in turn.texts]
    message = AssistantMessage(content=parts if len(parts) > 1 else "".join(turn.texts))
    if calls and not parts:
        message.content = None
    message.tool_calls = calls or None
    message.reasoning_content = "\n\n".join(thoughts) or None
    return [message]


def _others(turn: _Turn) -> list[ChatMessage]:
    """Results of tools, then what the user or the system says."""
    made: list[ChatMessage] = []
    for _, block in turn.blocks:
        if isinstance(block, ToolResultBlock):
            text = block.content or ""
            if not isinstance(text, str):
                text = "\n".join(part.text for part in text)
            if block.is_error and not text[:5].lower().startswith("error"):
                text = f"Error: {text}"
            made.append(ToolMessage(content=text, tool_call_id=block.tool_use_id))
    if turn.texts:
        kind = SystemMessage if turn.role == "system" else UserMessage
        parts = [TextPart(text=text) for text in turn.texts]
        made.append(kind(content=parts if len(parts) > 1 else parts[0].text))
    return made
