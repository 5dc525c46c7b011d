"""Results: what a step sampled becomes tokens of sequences, stop conditions are checked, outputs go out.

A row planned before its sequence was known to be finished is ignored here. A preempted sequence's rows still
count: its tokens were sampled from valid KV, and it does not run again before they are read.
"""

from __future__ import annotations

from dataclasses import dataclass

from leadline.engine.core.plan import SampledLogprobs, StepPlan, StepResult
from leadline.engine.core.sequence import Sequence, State
from leadline.engine.core.speculation import Speculation, accepted
from leadline.engine.core.state import SchedulerState
from leadline.engine.messages import CoreOutput, TokenLogprobs

__all__ = ["Flight", "Results"]


@dataclass(slots=True)
class Flight:
    """A step whose result has not been read."""

    step_id: int
    sampled: list[Sequence]
    """Sequence of each row with `sample`, in row order."""
    counts: list[int]
    """How many tokens each of these rows samples."""
    prompt_logprobs: list[tuple[int, Sequence, int]]
    """(slot, sequence, its `attempt` then) of each row that reports prompt logprobs."""


class Results:
    """Applies step results to the scheduler's state."""

    def __init__(self, state: SchedulerState, speculation: Speculation) -> None:
        self._state = state
        self._speculation = speculation
        self.generated_tokens = 0

    def flight(self, plan: StepPlan, seqs: list[Sequence]) -> Flight:
        """Return a record of the sequence of each row of `plan`: slots may change hands before its result is
        read. The rows belong to `seqs`."""
        sampled = [seq for row, seq in zip(plan.rows, seqs, strict=True) if row.sample]
        counts = [row.num_samples for row in plan.rows if row.sample]
        asked = [
            (row.slot, seq, seq.attempt)
            for row, seq in zip(plan.rows, seqs, strict=True)
            if row.prompt_logprobs
        ]
        return Flight(plan.step_id, sampled, counts, asked)

    def apply(self, flight: Flight, result: StepResult) -> list[CoreOutput]:
        """The outputs of one step, in row order."""
        for slot, seq, attempt in flight.prompt_logprobs:
            if not seq.finished and seq.attempt == attempt:
                seq.prompt_logprobs.extend(result.prompt_logprobs.get(slot, ()))
        state = self._state
        outputs: list[CoreOutput] = []
        at = 0
        for seq, count in zip(flight.sampled, flight.counts, strict=True):
            first, at = at, at + count
            seq.unread -= 1
            if seq.finished:
                continue
            if seq.num_dropped:
                self._drop(seq)
                continue
            tokens = result.tokens[first:at]
            if seq.drafted:
                tokens = self._keep(seq, tokens)
            output = self._add(seq, tokens)
            if seq.wants_logprobs:
                entries = result.logprobs[first : first + len(output.new_token_ids)]
                output.logprobs = [_wire(entry) for entry in entries if entry is not None]
            final = min(len(seq.token_ids), seq.computed)
            if seq.num_dropped:
                final = len(seq.token_ids) - 1  # the last token's KV is written again
            if final >= seq.commit_at:
                state.commit(seq, final)
            if output.finish_reason is not None:
                self._close(seq, output)
            else:
                if not seq.answered:
                    self._describe_first(seq, output)
                if seq.state is State.DRAINING and not seq.unread:
                    state.drained(seq)
            self.generated_tokens += len(output.new_token_ids)
            outputs.append(output)
        return outputs

    def _keep(self, seq: Sequence, sampled: list[int]) -> list[int]:
        """The tokens of a drafting row that count. KV of the drafts among them is in place; that of the
        others is not counted and will be overwritten."""
        drafted, seq.drafted = seq.drafted, []
        kept = accepted(drafted, sampled)
        self._speculation.learn(seq, len(drafted), kept)
        if seq.state is State.RUNNING:
            seq.computed += kept
        return sampled[: kept + 1]

    def _drop(self, seq: Sequence) -> None:
        """Pass over a token that was sampled without the mask that it needed: its row is planned again."""
        seq.num_dropped -= 1
        if seq.state is State.RUNNING:
            seq.computed -= 1
        elif not seq.unread:
            self._state.drained(seq)

    @staticmethod
    def _add(seq: Sequence, sampled: list[int]) -> CoreOutput:
        """Append tokens up to the one that ends the sequence, or after which a mask is needed."""
        output = CoreOutput(request_id=seq.request_id)
        tokens = seq.token_ids
        for count, token in enumerate(sampled, 1):
            tokens.append(token)
            if token in seq.stop_ids and len(tokens) > seq.min_len:
                output.finish_reason = "stop"
                output.stop_token_id = token
            elif len(tokens) >= seq.max_len:
                output.finish_reason = "length"
            if seq.thought is not None:
                seq.thought.take(token)
                seq.follow_thought()
            if output.finish_reason is not None or (seq.sync and count < len(sampled)):
                sampled = sampled[:count]
                break
        output.new_token_ids = sampled
        if seq.sync and (seq.unread or seq.may_draft):
            seq.num_dropped, seq.rewound = seq.unread, True
            if not seq.unread and seq.state is State.RUNNING:
                seq.computed = len(tokens) - 1  # behind a draft
        return output

    def _close(self, seq: Sequence, output: CoreOutput) -> None:
        self._describe_first(seq, output)
        self._state.finish(seq)

    def _describe_first(self, seq: Sequence, output: CoreOutput) -> None:
        self._state.describe(seq, output)
        if seq.wants_prompt_logprobs:
            output.prompt_logprobs = [_wire(entry) for entry in seq.prompt_logprobs]
            seq.wants_prompt_logprobs = False
            seq.prompt_logprobs = []


def _wire(entry: SampledLogprobs) -> TokenLogprobs:
    return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, entry.top)
