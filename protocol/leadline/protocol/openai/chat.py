"""Requests of `POST /v1/chat/completions`.

Field names and meanings follow OpenAI's API reference. The role decides the type of a message, so that wrong
fields are reported where they are: `$.messages[2].tool_call_id`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from leadline.protocol.openai.common import (
    NOT_SUPPORTED,
    GenerationRequest,
    MaxTokens,
    NonEmptyStr,
    Nothing,
    limit_of,
)

__all__ = [
    "AllowedToolsChoice",
    "AssistantMessage",
    "ChatCompletionRequest",
    "ChatMessage",
    "CustomTool",
    "DeveloperMessage",
    "Function",
    "FunctionCall",
    "FunctionMessage",
    "FunctionName",
    "NamedToolChoice",
    "ReasoningEffort",
    "RefusalPart",
    "SystemMessage",
    "TextPart",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "ToolMessage",
    "UserMessage",
    "function_tools",
]


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


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
    function_call: FunctionCall | None = None
    """The older form of `tool_calls`."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same by its newer name."""


class ToolMessage(msgspec.Struct, tag_field="role", tag="tool", kw_only=True, omit_defaults=True):
    content: str | list[TextPart]
    tool_call_id: str
    name: str | None = None


class FunctionMessage(msgspec.Struct, tag_field="role", tag="function", kw_only=True, omit_defaults=True):
    """The older form of a tool's answer; it answers an assistant message with `function_call`."""

    name: str
    content: str | None


ChatMessage = (
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage
)


class Function(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: NonEmptyStr
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments."""
    strict: bool | None = None


class Tool(msgspec.Struct, tag_field="type", tag="function", kw_only=True):
    function: Function


class CustomTool(msgspec.Struct, tag_field="type", tag="custom", kw_only=True):
    """A tool whose input is free text. It is skipped: no model that is served here was trained on one."""

    custom: dict[str, Any] | None = None


class FunctionName(msgspec.Struct, kw_only=True):
    name: NonEmptyStr


class NamedToolChoice(msgspec.Struct, tag_field="type", tag="function", kw_only=True):
    function: FunctionName


class NamedCustomTool(msgspec.Struct, tag_field="type", tag="custom", kw_only=True):
    """Refused, as nothing but a call of a skipped tool would do."""

    custom: dict[str, Any] | None = None


class AllowedTool(msgspec.Struct, kw_only=True):
    type: str = "function"
    function: FunctionName | None = None


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[AllowedTool], Meta(min_length=1)]


class AllowedToolsChoice(msgspec.Struct, tag_field="type", tag="allowed_tools", kw_only=True):
    """Only these of `tools` may be called, as if the request had no others."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice | NamedCustomTool


_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Of a tool, as OpenAI takes them: fit for a header and a log."""


def function_tools(tools: list[Tool | CustomTool]) -> tuple[list[Tool | CustomTool] | None, tuple[str, ...]]:
    """The tools that a model can be shown (None where there are none), and how to name those left out."""
    shown: list[Tool | CustomTool] = []
    skipped = []
    for index, tool in enumerate(tools):
        if isinstance(tool, Tool):
            shown.append(tool)
        else:
            name = (tool.custom or {}).get("name")
            known = isinstance(name, str) and _NAME.fullmatch(name)
            skipped.append(f"tools[{index}] {name}" if known else f"tools[{index}]")
    return shown or None, tuple(skipped)


_NOT_IN_CHATS = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "best_of": "use n, or /v1/completions",
    "chat_template": "use chat_template_kwargs, or a model folder with a chat_template.jinja of your own",
    "documents": "use messages that hold them",
    "modalities": "use only text: this model writes text only",
    "audio": "use a speech model on the text: this model writes text only",
    "web_search_options": "use tools: this server searches nothing by itself",
}


class ChatCompletionRequest(GenerationRequest, kw_only=True, dict=True):
    """Once decoded, `tools` holds function tools that may be called and no others."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: MaxTokens | None = None
    """The older name of max_completion_tokens, which wins when both are given."""
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    """Alternatives per token; needs `logprobs: true`. -1: the whole vocabulary."""
    tools: list[Tool | CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None

    # Extensions: how the chat template is applied.
    add_generation_prompt: bool | None = None
    """Open an assistant turn at the end; the default unless continue_final_message is set."""
    continue_final_message: bool | None = None
    """Leave the last message open, so that the model continues it."""
    add_special_tokens: bool | None = None
    """Put the model's BOS in front of what the template writes; false by default."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the template, such as enable_thinking."""

    # Extensions about the prompt in the answer.
    echo: bool | None = None
    """Put the last message in front of the answer, if it is the assistant's."""
    prompt_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    """Alternatives per prompt token; not in streams."""

    # Extension: how long the model may think.
    thinking_budget: Annotated[int, Meta(ge=-1)] | None = None
    """Tokens of a thought, at most; then the engine ends it. -1: no limit."""
    thinking_token_budget: Annotated[int, Meta(ge=-1)] | None = None
    """vLLM's name of it."""
    include_reasoning: bool | None = None
    """false: thoughts are left out of the answer."""

    # Refused, as are those of GenerationRequest.
    functions: None = None
    function_call: None = None
    best_of: Literal[1] | None = None
    chat_template: None = None
    documents: Nothing | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    web_search_options: None = None

    not_supported: ClassVar[Mapping[str, str]] = {**NOT_SUPPORTED, **_NOT_IN_CHATS}

    def __post_init__(self) -> None:
        GenerationRequest.__post_init__(self)
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("Expected no prompt_logprobs in a stream - at `$.prompt_logprobs`")
        self.max_tokens = limit_of("max_tokens", self.max_tokens, least=1)
        self.max_completion_tokens = limit_of("max_completion_tokens", self.max_completion_tokens, least=1)
        if self.thinking_budget is None:
            self.thinking_budget = self.thinking_token_budget
        skipped: tuple[str, ...] = ()
        if self.tools:
            self.tools, skipped = function_tools(self.tools)
        self.__dict__["skipped"] = (*skipped, *self.skipped_fields)
        if isinstance(self.tool_choice, AllowedToolsChoice):
            self._allow(self.tool_choice.allowed_tools)
        elif isinstance(self.tool_choice, NamedCustomTool):
            raise ValueError("Expected a tool of type 'function', the only one served - at `$.tool_choice`")

    @property
    def skipped(self) -> tuple[str, ...]:
        """Tools that were left out, since no model here can call them, and fields without effect."""
        skipped: tuple[str, ...] = self.__dict__.get("skipped", ())
        return skipped

    def _allow(self, allowed: AllowedTools) -> None:
        """Leave the other tools out; the choice is the mode."""
        names = {entry.function.name for entry in allowed.tools if entry.function is not None}
        given = [tool for tool in self.tools or () if isinstance(tool, Tool)]
        missing = names - {tool.function.name for tool in given}
        if missing or not names:
            named = repr(min(missing)) if missing else "no function"
            raise ValueError(f"Expected functions in tools, got {named} - at `$.tool_choice.allowed_tools`")
        self.tools = [tool for tool in given if tool.function.name in names]
        self.tool_choice = allowed.mode
