"""Requests of `POST /v1/chat/completions`.

Field names and meanings follow OpenAI's API reference. Messages are told apart by their role, so that wrong
fields are reported where they are: `$.messages[2].tool_call_id`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from leadline.protocol.openai.common import GenerationRequest, NonEmptyStr

__all__ = [
    "AssistantMessage",
    "ChatCompletionRequest",
    "ChatMessage",
    "DeveloperMessage",
    "Function",
    "FunctionCall",
    "FunctionName",
    "NamedToolChoice",
    "RefusalPart",
    "SystemMessage",
    "TextPart",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "ToolMessage",
    "UserMessage",
]


class TextPart(msgspec.Struct, tag_field="type", tag="text", kw_only=True):
    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal", kw_only=True):
    refusal: str


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str
    """JSON text, as the model wrote it."""


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class SystemMessage(msgspec.Struct, tag_field="role", tag="system", kw_only=True, omit_defaults=True):
    content: str | list[TextPart]
    name: str | None = None


class DeveloperMessage(msgspec.Struct, tag_field="role", tag="developer", kw_only=True, omit_defaults=True):
    content: str | list[TextPart]
    name: str | None = None


class UserMessage(msgspec.Struct, tag_field="role", tag="user", kw_only=True, omit_defaults=True):
    content: str | list[TextPart]
    name: str | None = None


class AssistantMessage(msgspec.Struct, tag_field="role", tag="assistant", kw_only=True, omit_defaults=True):
    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None


class ToolMessage(msgspec.Struct, tag_field="role", tag="tool", kw_only=True, omit_defaults=True):
    content: str | list[TextPart]
    tool_call_id: str
    name: str | None = None


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class Function(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: NonEmptyStr
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments."""
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, kw_only=True):
    name: NonEmptyStr


class NamedToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """The older name of max_completion_tokens, which wins when both are given."""
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    """Alternatives per token; needs `logprobs: true`."""
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: None = None
    """Refused, as is `function_call`: the older form of tools (NOT_SUPPORTED)."""
    function_call: None = None

    # Extensions: how the chat template is applied.
    add_generation_prompt: bool | None = None
    """Open an assistant turn at the end; the default unless continue_final_message is set."""
    continue_final_message: bool | None = None
    """Leave the last message open, so that the model continues it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the template, such as enable_thinking."""
