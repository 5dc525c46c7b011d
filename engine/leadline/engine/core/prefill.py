"""Prefill: chunks for sequences that are being prefilled, and admission of waiting ones.

Runs after the decodes of a step with the budget they left. Two rounds: in the first each class stays within
its share, in the second what is left goes to whoever can use it (a second grant lengthens the same row).

Admission takes all blocks for the known tokens at once, so a prefill never stops half-way for want of blocks:

    known tokens  |  prefix hit: referenced, shared  |  computed by this sequence, private until full  |
    blocks        |  b0  |  b1  |  b2  |  b3  |  b4  |  b5  |  b6  |  b7  |
                                              `- at least the last token is always computed (E6): a hit ends
                                                 at (len - 1) // block_size blocks, so that no shared block is
                                                 written
"""

from __future__ import annotations

import math

from leadline.engine.core.books import Books
from leadline.engine.core.plan import NewSeq, StepPlan, StepRow
from leadline.engine.core.sequence import Sequence
from leadline.engine.core.step_time import LEAST_TOKENS, StepTime

__all__ = ["Prefill"]


class Prefill:
    """Plans the prefill part of steps; also keeps the prefix cache's hit statistics."""

    def __init__(self, books: Books, step_time: StepTime | None = None) -> None:
        """step_time: bounds what a step computes while interactive requests decode."""
        self._books = books
        self._step_time = step_time
        self._work_left = math.inf
        self.query_tokens = 0
        self.hit_tokens = 0
        self._starts: dict[Sequence, int] = {}

    def plan(
        self, plan: StepPlan, budget: int, now: float, may_admit: bool
    ) -> tuple[list[StepRow], list[Sequence]]:
        """Share `budget` tokens out.

        Returns rows and their sequences, aligned; entered sequences go into `plan`.
        """
        books = self._books
        policy = books.policy
        self._starts = {}
        self._work_left = math.inf
        if self._step_time is not None and any(seq.priority_class == "interactive" for seq in books.decoding):
            self._work_left = self._step_time.allowed()
        policy.begin_step(budget, {seq.priority_class for seq in books.prefilling})
        budget = self._round(plan, budget, now, may_admit)
        if budget > 0:
            policy.lift_limits()
            self._round(plan, budget, now, may_admit)
        return self._rows()

    def _round(self, plan: StepPlan, budget: int, now: float, may_admit: bool) -> int:
        """One round over running prefills, then waiting sequences; returns the budget left."""
        books = self._books
        for seq in books.prefilling:
            if budget <= 0:
                return budget
            budget -= self._grant(seq, budget)
        while may_admit and budget > 0 and self._work_left > 0 and books.free_slots:
            candidate = books.policy.peek()
            if candidate is None or books.policy.limit(candidate) < 1:
                break
            if self._park(candidate):
                continue
            if not self._admit(candidate, plan, now):
                break
            budget -= self._grant(candidate, budget)
            if books.config.prefix_caching:
                books.dedup.own(candidate, candidate.committed, len(candidate.hashes))
        return budget

    def _park(self, seq: Sequence) -> bool:
        """Let `seq` wait for blocks that a running sequence is about to compute (E7)."""
        books = self._books
        if not books.config.prefix_caching or seq.wants_prompt_logprobs:
            return False
        books.extend_hashes(seq, len(seq.token_ids) // books.config.block_size)
        usable = self._usable(seq)
        first = len(books.pool.match(seq.hashes, usable))
        if not books.dedup.park(seq, first, usable):
            return False
        books.policy.withdraw(seq)
        return True

    def _usable(self, seq: Sequence) -> int:
        """Blocks a prefix hit may cover."""
        return (len(seq.token_ids) - 1) // self._books.config.block_size

    def _admit(self, seq: Sequence, plan: StepPlan, now: float) -> bool:
        """Give `seq` a slot and all blocks of its known tokens, if there are enough."""
        books, pool = self._books, self._books.pool
        hits: list[int] = []
        if books.config.prefix_caching:
            books.extend_hashes(seq, len(seq.token_ids) // books.config.block_size)
            if not seq.wants_prompt_logprobs:
                hits = pool.match(seq.hashes, self._usable(seq))
        missing = -(-len(seq.token_ids) // books.config.block_size) - len(hits)
        if missing + pool.num_unreferenced(hits) > pool.num_available - self._headroom():
            return False
        pool.acquire(hits)
        books.admit(seq, hits + pool.allocate(missing), len(hits))
        self._enter(seq, plan, now)
        return True

    def _headroom(self) -> int:
        """Blocks kept back for the growth of running sequences: admission should not cause preemption."""
        books = self._books
        return min(len(books.decoding), books.pool.num_blocks // 32)

    def _enter(self, seq: Sequence, plan: StepPlan, now: float) -> None:
        request = seq.request
        if seq.admitted_at is None:
            seq.admitted_at = now
            seq.cached_tokens = seq.computed
            self.query_tokens += len(seq.token_ids)
            self.hit_tokens += seq.computed
        plan.entered.append(
            NewSeq(
                slot=seq.slot,
                seq_id=seq.seq_id,
                token_ids=list(seq.token_ids),
                prompt_len=seq.prompt_len,
                sampling=request.sampling,
                seed=request.seed,
                block_ids=list(seq.blocks),
                banned_until_min=_banned(seq) if request.sampling.min_tokens else (),
            )
        )

    def _grant(self, seq: Sequence, budget: int) -> int:
        """Plan the next tokens of `seq`, as many as budget, share, chunk size and time allow; returns how
        many."""
        books = self._books
        start = self._starts.get(seq, seq.computed)
        count = min(budget, seq.prefill_left, books.policy.limit(seq))
        if books.config.prefill_chunk is not None:
            count = min(count, start + books.config.prefill_chunk - seq.computed)
        if self._step_time is not None and self._work_left < math.inf:
            count = self._within_time(self._step_time, seq.computed, count)
        if seq.blocked and count == seq.prefill_left:
            count -= 1  # the last one samples
        if count <= 0:
            return 0
        self._starts[seq] = start
        seq.computed += count
        books.policy.charge(seq, count)
        if seq.computed >= seq.commit_at:
            books.commit(seq, seq.computed)
        return count

    def _within_time(self, step_time: StepTime, start: int, count: int) -> int:
        """At most `count` tokens from `start` on that the step has time for: whole tiles of LEAST_TOKENS, and
        one of them at least if they are its first."""
        fitting = step_time.tokens(start, self._work_left)
        if fitting >= count:
            self._work_left -= step_time.work(start, count)
            return count
        self._work_left = 0.0
        fitting -= fitting % LEAST_TOKENS
        return min(count, fitting if self._starts else max(fitting, LEAST_TOKENS))

    def _rows(self) -> tuple[list[StepRow], list[Sequence]]:
        """Turn the step's grants into rows.

        Whoever has all known tokens planned samples and decodes from now on.
        """
        books = self._books
        rows, seqs = [], []
        for seq, start in self._starts.items():
            done = not seq.prefill_left
            wants = seq.wants_prompt_logprobs and start < len(seq.request.prompt_token_ids)
            rows.append(StepRow(seq.slot, start, seq.computed - start, done, wants))
            seqs.append(seq)
            if done:
                seq.unread += 1
                del books.prefilling[seq]
                books.decoding[seq] = None
        return rows, seqs


def _banned(seq: Sequence) -> tuple[int, ...]:
    """Tokens that would stop `seq`, but for those that may be forced: the end of a thought."""
    thought = seq.request.thought
    return tuple(seq.stop_ids.difference(() if thought is None else thought.closing))
