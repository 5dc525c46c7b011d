"""Answers of the Messages API, whole and as the events of a stream.

message_start ping (content_block_start content_block_delta* content_block_stop)* message_delta
message_stop
"""

from __future__ import annotations

from typing import Literal

import msgspec

from leadline.protocol.anthropic.content import TextBlock, ThinkingBlock, ToolUseBlock
from leadline.protocol.openai.common import Count, PromptTokensDetails
from leadline.protocol.openai.common import Usage as ChatUsage

__all__ = [
    "AnswerBlock",
    "ContentBlockDelta",
    "ContentBlockStart",
    "ContentBlockStop",
    "InputJsonDelta",
    "MessageAnswer",
    "MessageDelta",
    "MessageStart",
    "MessageStop",
    "MessageTokensCount",
    "MessageUsage",
    "Ping",
    "SignatureDelta",
    "Stop",
    "StopReason",
    "TextDelta",
    "ThinkingDelta",
]

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal", "model_context_window_exceeded"
]
AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, kw_only=True):
    input_tokens: Count
    """Prompt tokens that were not in the prefix cache."""
    cache_creation_input_tokens: Count = 0
    """Always 0: prompts are cached without being asked, and without a price."""
    cache_read_input_tokens: Count = 0
    """Prompt tokens whose KV came from the prefix cache."""
    output_tokens: Count

    @classmethod
    def of(cls, usage: ChatUsage, *, output_tokens: int | None = None) -> MessageUsage:
        """Return the usage as this API counts. `output_tokens`: instead of those in `usage`."""
        details = usage.prompt_tokens_details
        cached = 0 if details is None else details.cached_tokens
        return cls(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens if output_tokens is None else output_tokens,
        )

    def of_chat(self) -> ChatUsage:
        """Return the usage as chats count."""
        cached = self.cache_read_input_tokens
        prompt = self.input_tokens + self.cache_creation_input_tokens + cached
        return ChatUsage(
            prompt_tokens=prompt,
            completion_tokens=self.output_tokens,
            total_tokens=prompt + self.output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )


class MessageAnswer(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    """Null in message_start."""
    stop_sequence: str | None = None
    """The one that the model wrote."""
    usage: MessageUsage


class MessageTokensCount(msgspec.Struct, kw_only=True):
    """Answer of `POST /v1/messages/count_tokens`."""

    input_tokens: Count


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start", kw_only=True):
    message: MessageAnswer


class Ping(msgspec.Struct, tag_field="type", tag="ping", kw_only=True):
    pass


class ContentBlockStart(msgspec.Struct, tag_field="type", tag="content_block_start", kw_only=True):
    index: int
    content_block: AnswerBlock


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta", kw_only=True):
    text: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta", kw_only=True):
    partial_json: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta", kw_only=True):
    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta", kw_only=True):
    signature: str


class ContentBlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta", kw_only=True):
    index: int
    delta: TextDelta | InputJsonDelta | ThinkingDelta | SignatureDelta


class ContentBlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop", kw_only=True):
    index: int


class Stop(msgspec.Struct, kw_only=True):
    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta", kw_only=True):
    delta: Stop
    usage: MessageUsage
    """Of the whole request."""


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop", kw_only=True):
    pass
