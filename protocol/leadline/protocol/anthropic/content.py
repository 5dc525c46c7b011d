"""Content blocks and messages of a request.

Markers such as `cache_control` and `citations` are accepted like every unknown field: they do not change the
answer. The prefix cache needs no markers.
"""

from __future__ import annotations

from typing import Any

import msgspec

from leadline.protocol.openai.common import NonEmptyStr

__all__ = [
    "AssistantTurn",
    "Block",
    "Content",
    "Message",
    "RedactedThinkingBlock",
    "SystemTurn",
    "TextBlock",
    "ThinkingBlock",
    "ToolReferenceBlock",
    "ToolResultBlock",
    "ToolUseBlock",
    "UserTurn",
]


class TextBlock(msgspec.Struct, tag_field="type", tag="text", kw_only=True):
    text: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", kw_only=True):
    id: NonEmptyStr
    name: NonEmptyStr
    input: dict[str, Any]


class ToolReferenceBlock(msgspec.Struct, tag_field="type", tag="tool_reference", kw_only=True):
    """A tool that a search of the client's has found. `tools` has it too."""

    tool_name: NonEmptyStr

    @property
    def text(self) -> str:
        return f"Tool found: {self.tool_name}"


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", kw_only=True):
    tool_use_id: NonEmptyStr
    content: str | list[TextBlock | ToolReferenceBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", kw_only=True):
    thinking: str
    signature: str | None = None
    """Accepted as it is: thoughts are not verified."""


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking", kw_only=True):
    """A thought that only its author can read. It is left out."""

    data: str | None = None


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock
Content = str | list[Block]


class UserTurn(msgspec.Struct, tag_field="role", tag="user", kw_only=True):
    content: Content


class AssistantTurn(msgspec.Struct, tag_field="role", tag="assistant", kw_only=True):
    content: Content


class SystemTurn(msgspec.Struct, tag_field="role", tag="system", kw_only=True):
    content: Content


Message = UserTurn | AssistantTurn | SystemTurn
