"""Requests of `POST /v1/chat/completions`.

Field names and meanings follow OpenAI's API reference. Messages are told apart by their role, so that wrong
fields are reported where they are: `$.messages[2].tool_call_id`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from leadline.protocol.openai.common import NOT_SUPPORTED, GenerationRequest, NonEmptyStr, Nothing, refused

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


_NOT_IN_CHATS = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "echo": "use the prompt of /v1/completions",
    "best_of": "use n, or /v1/completions",
    "prompt_logprobs": "use that of /v1/completions",
    "add_special_tokens": "use that of /v1/completions: a chat template writes its special tokens itself",
    "chat_template": "use chat_template_kwargs, or a model folder with a chat_template.jinja of your own",
    "documents": "use messages that hold them",
    "modalities": "use only text: this model writes text only",
    "audio": "use a speech model on the text: this model writes text only",
    "web_search_options": "use tools: this server searches nothing by itself",
}


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

    # Extensions: how the chat template is applied.
    add_generation_prompt: bool | None = None
    """Open an assistant turn at the end; the default unless continue_final_message is set."""
    continue_final_message: bool | None = None
    """Leave the last message open, so that the model continues it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the template, such as enable_thinking."""

    # Refused, as are those of GenerationRequest.
    functions: None = None
    function_call: None = None
    echo: bool | None = None
    best_of: Literal[1] | None = None
    prompt_logprobs: None = None
    add_special_tokens: bool | None = None
    chat_template: None = None
    documents: Nothing | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    web_search_options: None = None

    not_supported: ClassVar[Mapping[str, str]] = {**NOT_SUPPORTED, **_NOT_IN_CHATS}

    def __post_init__(self) -> None:
        GenerationRequest.__post_init__(self)
        if self.echo or self.add_special_tokens:
            raise refused("echo" if self.echo else "add_special_tokens")
