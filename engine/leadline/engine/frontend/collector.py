"""Adds up the deltas of one request to its `RequestOutput`. Used by `LLM.generate` and by non-streaming
responses."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from leadline.engine.messages import TokenLogprobs
from leadline.engine.outputs import CompletionOutput, OutputDelta, RequestOutput

__all__ = ["OutputCollector"]


@dataclass(slots=True)
class _Parts:
    """One choice so far; text is joined once at the end."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    last: OutputDelta | None = None


class OutputCollector:
    """Collects n choices. `done` once each has a finish_reason."""

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: list[int], n: int = 1) -> None:
        self._result = RequestOutput(request_id, prompt, prompt_token_ids, [])
        self._parts = [_Parts() for _ in range(n)]
        self._open = n
        self._started = time.monotonic()
        self.error: OutputDelta | None = None
        """The first delta that ended a choice with anything but stop, length or abort."""

    @property
    def done(self) -> bool:
        return self._open == 0

    def add(self, delta: OutputDelta) -> bool:
        """Take in a delta; return `done`."""
        parts = self._parts[delta.index]
        parts.texts.append(delta.text)
        parts.token_ids += delta.token_ids
        if delta.logprobs is not None:
            parts.logprobs = (parts.logprobs or []) + delta.logprobs
        parts.last = delta
        result = self._result
        if delta.token_ids and not result.first_token_seconds:
            result.first_token_seconds = time.monotonic() - self._started
        if delta.prompt_logprobs is not None:
            result.prompt_logprobs = delta.prompt_logprobs
        # The choices of one request share its prompt: the first one admitted computes it, the others find it
        # cached.
        if delta.index == 0:
            result.num_cached_tokens = delta.num_cached_tokens
            result.queue_seconds = delta.queue_seconds or result.queue_seconds
        if delta.finish_reason is not None:
            self._open -= 1
            if self.error is None and delta.finish_reason not in ("stop", "length", "abort"):
                self.error = delta
        return self.done

    def result(self) -> RequestOutput:
        """The totals; call it once `done`."""
        self._result.total_seconds = time.monotonic() - self._started
        self._result.outputs = [
            CompletionOutput(
                index=index,
                text="".join(parts.texts),
                token_ids=parts.token_ids,
                logprobs=parts.logprobs,
                finish_reason=None if parts.last is None else parts.last.finish_reason,
                stop_reason=None if parts.last is None else parts.last.stop_reason,
            )
            for index, parts in enumerate(self._parts)
        ]
        return self._result
