"""A launched step: copies to the host are under way; `wait` turns them into a StepResult."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from leadline.engine.core.plan import SampledLogprobs, StepResult
from leadline.engine.sampling import LogprobRows

__all__ = ["PromptLogprobsPart", "RunnerHandle", "start_copy"]


def start_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory, once the stream has got there (at once on CPU)."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


@dataclass(slots=True)
class PromptLogprobsPart:
    """Log-probabilities of some consecutive prompt positions of a slot, with `count` alternatives each."""

    slot: int
    rows: LogprobRows
    count: int


@dataclass(slots=True)
class RunnerHandle:
    """Tensors are host copies in flight."""

    step_id: int
    tokens: torch.Tensor | None
    """int64 [S]; None when the step samples nothing."""
    logprobs: LogprobRows | None
    logprob_rows: list[int] = field(default_factory=list)
    """Sampled rows that `logprobs` belongs to."""
    logprob_counts: list[int] = field(default_factory=list)
    prompt_parts: list[PromptLogprobsPart] = field(default_factory=list)
    prompt_slots: list[int] = field(default_factory=list)
    """Slots that asked for prompt logprobs, those without any position included."""
    event: torch.cuda.Event | None = None

    def wait(self) -> StepResult:
        if self.event is not None:
            self.event.synchronize()
        tokens = [] if self.tokens is None else self.tokens.tolist()
        logprobs: list[SampledLogprobs | None] = [None] * len(tokens)
        if self.logprobs is not None:
            entries = self.logprobs.entries(self.logprob_counts)
            for row, entry in zip(self.logprob_rows, entries, strict=True):
                logprobs[row] = entry
        prompt: dict[int, list[SampledLogprobs]] = {slot: [] for slot in self.prompt_slots}
        for part in self.prompt_parts:
            prompt[part.slot].extend(part.rows.entries([part.count] * len(part.rows.token_ids)))
        return StepResult(self.step_id, tokens, logprobs, prompt)
