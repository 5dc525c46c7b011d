"""Results: what a step sampled becomes tokens of sequences, stop conditions are checked, outputs go out.

A row planned before its sequence was known to be finished is ignored here. A preempted sequence's rows still
count: its tokens were sampled from valid KV, and it does not run again before they are read.
"""

from __future__ import annotations

from dataclasses import dataclass

from leadline.engine.core.books import Books
from leadline.engine.core.plan import SampledLogprobs, StepPlan, StepResult
from leadline.engine.core.sequence import Sequence, State
from leadline.engine.messages import CoreOutput, TokenLogprobs

__all__ = ["Flight", "Results"]


@dataclass(slots=True)
class Flight:
    """A step whose result has not been read."""

    step_id: int
    sampled: list[Sequence]
    """Sequence of each row with `sample`, in row order."""
    prompt_logprobs: list[tuple[int, Sequence, int]]
    """(slot, sequence, its `attempt` then) of each row that reports prompt logprobs."""


class Results:
    """Applies step results to the books."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.generated_tokens = 0

    def flight(self, plan: StepPlan, seqs: list[Sequence]) -> Flight:
        """Remember who is who in `plan`, whose rows belong to `seqs`.

        Slots may change hands before it is read.
        """
        sampled = [seq for row, seq in zip(plan.rows, seqs, strict=True) if row.sample]
        asked = [
            (row.slot, seq, seq.attempt)
            for row, seq in zip(plan.rows, seqs, strict=True)
            if row.prompt_logprobs
        ]
        return Flight(plan.step_id, sampled, asked)

    def apply(self, flight: Flight, result: StepResult) -> list[CoreOutput]:
        """The outputs of one step, in row order."""
        for slot, seq, attempt in flight.prompt_logprobs:
            if not seq.finished and seq.attempt == attempt:
                seq.prompt_logprobs.extend(result.prompt_logprobs.get(slot, ()))
        books = self._books
        outputs: list[CoreOutput] = []
        for seq, token, logprobs in zip(flight.sampled, result.tokens, result.logprobs, strict=True):
            seq.unread -= 1
            if seq.finished:
                continue
            tokens = seq.token_ids
            tokens.append(token)
            length = len(tokens)
            if length >= seq.commit_at and seq.computed >= seq.commit_at:
                books.commit(seq, min(length, seq.computed))
            output = CoreOutput(request_id=seq.request_id, new_token_ids=[token])
            if logprobs is not None and seq.wants_logprobs:
                output.logprobs = [_wire(logprobs)]
            if token in seq.stop_ids and length > seq.min_len:
                output.finish_reason = "stop"
                output.stop_token_id = token
                self._close(seq, output)
            elif length >= seq.max_len:
                output.finish_reason = "length"
                self._close(seq, output)
            else:
                if not seq.answered:
                    self._describe_first(seq, output)
                if seq.state is State.DRAINING and not seq.unread:
                    books.drained(seq)
            outputs.append(output)
        self.generated_tokens += len(outputs)
        return outputs

    def _close(self, seq: Sequence, output: CoreOutput) -> None:
        self._describe_first(seq, output)
        self._books.finish(seq)

    def _describe_first(self, seq: Sequence, output: CoreOutput) -> None:
        self._books.describe(seq, output)
        if seq.wants_prompt_logprobs:
            output.prompt_logprobs = [_wire(entry) for entry in seq.prompt_logprobs]
            seq.wants_prompt_logprobs = False
            seq.prompt_logprobs = []


def _wire(entry: SampledLogprobs) -> TokenLogprobs:
    return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, entry.top)
