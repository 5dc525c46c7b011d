"""Answers of both completion endpoints, whole and as streaming chunks.

OpenAI's own fields are always present (null where empty), as its clients expect; our extensions are absent
unless they say something; whole answers have vLLM's as nulls too. JSON knows no infinity: code that fills in
a log probability clamps it to LOGPROB_FLOOR.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from leadline.protocol.openai.chat import ToolCall
from leadline.protocol.openai.common import FinishReason, Usage

__all__ = [
    "LOGPROB_FLOOR",
    "ChatChoice",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatDelta",
    "ChatLogprobs",
    "ChatResponseMessage",
    "ChatTokenLogprob",
    "ChatTopLogprob",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
    "FunctionCallDelta",
    "PromptLogprob",
    "ToolCallDelta",
]

LOGPROB_FLOOR = -9999.0


class ChatTopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None = None
    """UTF-8 of the token, which need not be whole characters."""


class ChatTokenLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[ChatTopLogprob] = []


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ChatTokenLogprob] | None = None
    refusal: list[ChatTokenLogprob] | None = None


class ChatResponseMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    """Extension: what the model thought before it answered."""
    reasoning: str | UnsetType = UNSET
    """The same by its newer name."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class PromptLogprob(msgspec.Struct, kw_only=True):
    logprob: float
    rank: int
    decoded_token: str


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatResponseMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """Extension: the stop token id or stop string that ended it."""
    matched_stop: int | str | UnsetType = UNSET
    """Extension: the same, or the end token."""
    token_ids: list[int] | None = None
    """Extension, with return_token_ids: the output tokens."""


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    """Seconds since the Unix epoch."""
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    """Extension: per prompt token, token id to its log probability; null for the first."""
    prompt_token_ids: list[int] | None = None
    """Extension, with return_token_ids."""


class FunctionCallDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None
    """To be appended to the arguments so far."""


class ToolCallDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Part of one tool call: id, type and name come first and once, then arguments piece by piece."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta | None = None


class ChatDelta(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    """In the first chunk of a choice."""
    content: str | UnsetType | None = UNSET
    refusal: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType = UNSET
    matched_stop: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    """With stream_options.include_usage: null, and in the last chunk the usage of the request."""
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Extension, with return_token_ids: in the first chunk."""


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Columns of equal length, one row a token."""

    text_offset: list[int] = []
    """Where the token starts in the choice's text, in characters."""
    token_logprobs: list[float | None] = []
    """null for the first token of an echoed prompt."""
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] | None = None
    """The likeliest tokens at each place, and the one that stands there."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A whole choice, or what one chunk of a stream adds to it; then finish_reason is null until the last."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    matched_stop: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | UnsetType | None = UNSET
    """Extension: per prompt token, token id to its log probability; null for the first."""
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    """Extension, with return_token_ids: in a stream in the choice's first chunk."""


class Completion(msgspec.Struct, kw_only=True):
    """The answer, and in a stream each chunk: OpenAI gives both the same shape and object name."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
