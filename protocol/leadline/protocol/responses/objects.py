"""The response object, its output items, and the events of a stream. OpenAI's fields are always present, null
where there is nothing to say."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from leadline.protocol.openai.answers import ChatTokenLogprob
from leadline.protocol.responses.request import (
    ReasoningConfig,
    ResponsesTool,
    TextConfig,
    TextFormatConfig,
    ToolChoiceConfig,
)

__all__ = [
    "ArgumentsDelta",
    "ArgumentsDone",
    "FunctionCallItem",
    "IncompleteDetails",
    "ItemAdded",
    "ItemDone",
    "MessageItem",
    "OutputItem",
    "OutputText",
    "PartAdded",
    "PartDone",
    "ReasoningItem",
    "ReasoningText",
    "ReasoningTextDelta",
    "ReasoningTextDone",
    "ResponseCompleted",
    "ResponseCreated",
    "ResponseErrorEvent",
    "ResponseEvent",
    "ResponseFailed",
    "ResponseFailure",
    "ResponseInProgress",
    "ResponseIncomplete",
    "ResponseObject",
    "ResponseUsage",
    "ShownTool",
    "Status",
    "StreamEvent",
    "TextDelta",
    "TextDone",
]

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text", kw_only=True):
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text", kw_only=True):
    text: str


class MessageItem(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it."""


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    id: str
    status: Status
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: str | None = None


OutputItem = MessageItem | FunctionCallItem | ReasoningItem


class InputTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct, kw_only=True):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ShownTool(msgspec.Struct, kw_only=True):
    """A function as the response repeats it."""

    type: Literal["function"] = "function"
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @classmethod
    def of(cls, tool: ResponsesTool) -> ShownTool:
        return cls(
            name=tool.name or "", description=tool.description, parameters=tool.parameters, strict=tool.strict
        )


class ResponseObject(msgspec.Struct, kw_only=True):
    """The answer, and what the first and the last events of a stream hold."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Seconds since the Unix epoch."""
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool = False
    completed_at: int | None = None
    """Null in streams, whose bytes must not depend on the pod that ends them."""
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: ReasoningConfig = msgspec.field(default_factory=ReasoningConfig)
    safety_identifier: str | None = None
    service_tier: str = "default"
    temperature: float | None = None
    text: TextConfig = msgspec.field(default_factory=lambda: TextConfig(format=TextFormatConfig(type="text")))
    tool_choice: str | ToolChoiceConfig = "auto"
    tools: list[ShownTool] = []
    """Functions; tools that were skipped are not among them."""
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class ResponseEvent(msgspec.Struct, tag_field="type", kw_only=True):
    """What all events have: the name as `type`, and a number, which is their last field."""


class ResponseCreated(ResponseEvent, tag="response.created", kw_only=True):
    response: ResponseObject
    sequence_number: int = 0


class ResponseInProgress(ResponseEvent, tag="response.in_progress", kw_only=True):
    response: ResponseObject
    sequence_number: int = 0


class ResponseCompleted(ResponseEvent, tag="response.completed", kw_only=True):
    response: ResponseObject
    sequence_number: int = 0


class ResponseIncomplete(ResponseEvent, tag="response.incomplete", kw_only=True):
    response: ResponseObject
    sequence_number: int = 0


class ResponseFailed(ResponseEvent, tag="response.failed", kw_only=True):
    response: ResponseObject
    sequence_number: int = 0


class ResponseErrorEvent(ResponseEvent, tag="error", kw_only=True):
    """The stream cannot go on, and the response is lost."""

    code: str | None
    message: str
    param: str | None = None
    sequence_number: int = 0


class ItemAdded(ResponseEvent, tag="response.output_item.added", kw_only=True):
    output_index: int
    item: OutputItem
    sequence_number: int = 0


class ItemDone(ResponseEvent, tag="response.output_item.done", kw_only=True):
    output_index: int
    item: OutputItem
    sequence_number: int = 0


class PartAdded(ResponseEvent, tag="response.content_part.added", kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText
    sequence_number: int = 0


class PartDone(ResponseEvent, tag="response.content_part.done", kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText
    sequence_number: int = 0


class TextDelta(ResponseEvent, tag="response.output_text.delta", kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[ChatTokenLogprob] = []
    sequence_number: int = 0


class TextDone(ResponseEvent, tag="response.output_text.done", kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[ChatTokenLogprob] = []
    sequence_number: int = 0


class ReasoningTextDelta(ResponseEvent, tag="response.reasoning_text.delta", kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    sequence_number: int = 0


class ReasoningTextDone(ResponseEvent, tag="response.reasoning_text.done", kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    sequence_number: int = 0


class ArgumentsDelta(ResponseEvent, tag="response.function_call_arguments.delta", kw_only=True):
    item_id: str
    output_index: int
    delta: str
    sequence_number: int = 0


class ArgumentsDone(ResponseEvent, tag="response.function_call_arguments.done", kw_only=True):
    item_id: str
    output_index: int
    arguments: str
    sequence_number: int = 0


StreamEvent = (
    ResponseCreated
    | ResponseInProgress
    | ItemAdded
    | PartAdded
    | TextDelta
    | TextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
    | PartDone
    | ItemDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ResponseErrorEvent
)
"""Any event of a stream."""
