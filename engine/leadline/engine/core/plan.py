"""The contract between the scheduler (pure Python) and the model runner (torch): one step's plan and result.

    Scheduler.schedule() ─StepPlan─▶ Runner.launch() ─StepHandle─▶ wait() ─StepResult─▶ Scheduler.update()

A running sequence owns a *slot*, a row in the runner's persistent tables (token ids, block table, last
sampled token, sampling state), for as long as it runs; preemption gives the slot back and resumption
takes a new one. A plan only says what changed: slots released, sequences entering, blocks appended, and
which rows to compute. Step N+1 may be scheduled before step N's tokens are known: a row whose `start`
lies at or beyond the tokens the runner was given takes its input from the device-side "last sampled
token" of its slot, so that no token value has to cross the host.

    tokens of a sequence   |<--- given to the runner in NewSeq.token_ids --->|<- sampled, on the device ->|
    KV computed            |<------- start ------->|<-- count -->|
                                                     `- the query tokens of this step's row

This module imports nothing but dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from leadline.engine.sampling_params import SamplingParams

__all__ = ["NewSeq", "Runner", "SampledLogprobs", "StepHandle", "StepPlan", "StepResult", "StepRow"]


@dataclass(slots=True)
class NewSeq:
    """A sequence that takes a slot with this step (admitted, or resumed after preemption)."""

    slot: int
    seq_id: int
    token_ids: list[int]
    """Every token known: the prompt, and what was generated before a preemption."""
    prompt_len: int
    """token_ids[:prompt_len] are the prompt; penalties treat the rest as output."""
    sampling: SamplingParams
    seed: int
    """Resolved seed, 64 bits. Noise for the token at position p is a function of (seed, p) alone."""
    block_ids: list[int]
    """Its block table so far: block i holds the KV of positions [i * block_size, (i + 1) * block_size)."""
    banned_until_min: tuple[int, ...] = ()
    """With sampling.min_tokens > 0: the EOS and stop ids not to be sampled at positions below prompt_len
    + min_tokens."""


@dataclass(slots=True)
class StepRow:
    """One sequence's part of a step: query tokens at positions [start, start + count)."""

    slot: int
    start: int
    count: int
    sample: bool
    """The logits after the last query token yield a sampled token, which becomes the slot's last token."""
    prompt_logprobs: bool = False
    """Also report log-probabilities of the prompt tokens that follow each query token."""
    tokens: list[int] | None = None
    """The query tokens, where the plan brings them: a sequence's last known token, and drafted ones after
    it. Then `sample` is set, and each of the `count` query tokens yields a token. Which of them count is for
    the scheduler to find out: the slot's last token is undefined until a row samples after it."""

    @property
    def num_samples(self) -> int:
        if not self.sample:
            return 0
        return 1 if self.tokens is None else self.count


@dataclass(slots=True)
class StepPlan:
    """One step. Apply in this order: released, entered, grown, then compute rows."""

    step_id: int
    released: list[int] = field(default_factory=list)
    """Slots whose sequence finished, was aborted or was preempted since the last plan."""
    entered: list[NewSeq] = field(default_factory=list)
    grown: list[tuple[int, list[int]]] = field(default_factory=list)
    """(slot, block ids appended to its block table)."""
    rows: list[StepRow] = field(default_factory=list)
    """Rows with count == 1 first (decode), then longer ones (prefill chunks)."""
    masks: dict[int, Any] = field(default_factory=dict)
    """slot → allowed-token bitmask (numpy int32 [ceil(vocab / 32)], bit set = allowed) for structured output.
    Filled by the engine core after scheduling, since it needs the tokenizer's grammar state."""

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def num_samples(self) -> int:
        return sum(row.num_samples for row in self.rows)


@dataclass(slots=True)
class SampledLogprobs:
    """Log-probabilities at one position: of the token that stands there, and of the most likely ones."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: list[tuple[int, float]] = field(default_factory=list)
    """(token id, logprob), most likely first."""


@dataclass(slots=True)
class StepResult:
    """What a step computed. `tokens` holds `num_samples` tokens a row, one row after the other."""

    step_id: int
    tokens: list[int]
    logprobs: list[SampledLogprobs | None]
    """Aligned with tokens; None where the sequence asked for none. Of the model's own distribution: before
    penalties, bias, masks, temperature and truncation."""
    prompt_logprobs: dict[int, list[SampledLogprobs]] = field(default_factory=dict)
    """slot → entries for prompt positions start+1 .. start+count (clipped to the prompt's end)."""


class StepHandle(Protocol):
    """A launched step. `wait` blocks until its tokens are on the host; call it once, in launch order."""

    def wait(self) -> StepResult: ...


class Runner(Protocol):
    """What executes plans. Plans are launched in order; `launch` must not block on the device."""

    num_blocks: int

    def launch(self, plan: StepPlan) -> StepHandle: ...
