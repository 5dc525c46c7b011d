"""What callers of the engine get back: increments (`OutputDelta`) and, at the end, `RequestOutput`."""

from __future__ import annotations

from dataclasses import dataclass, field

from leadline.engine.messages import Failure, FinishReason, TokenLogprobs

__all__ = ["CompletionOutput", "OutputDelta", "RequestOutput"]


@dataclass(slots=True)
class OutputDelta:
    """New output of one choice of one request.

    Text is final once given: stop strings and broken characters are held back.
    """

    request_id: str
    index: int
    """Which of the n choices."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for EOS and for length."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    """Of this choice, so far."""
    queue_seconds: float | None = None
    error: str | None = None
    failure: Failure | None = None
    resumed: bool = False
    """Text and tokens that an earlier attempt gave out. It comes first, and is not given out again; its
    finish reason is, where the earlier attempt was over."""


@dataclass(slots=True)
class CompletionOutput:
    """One finished choice."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """Everything about one finished request of `LLM.generate`, in input order."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    """Submission to first token."""
    total_seconds: float = 0.0
