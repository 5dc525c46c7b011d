"""The rows of a step: first decodes, then chunks of prompts with the budget that is left.

**Decode.** One row for every running sequence whose known tokens are computed, in every step (E20). First all
blocks that this step's decodes need are found, by preemption if nothing is free. Only then are rows planned,
so that no row of a preempted sequence has to be taken back.

**Prefill.** Two rounds: in the first each class stays within its share, in the second the rest goes to any
sequence that can use it (a second grant lengthens the same row). Admission takes all blocks for the known
tokens at once, so a prefill never stops half-way for want of blocks:

    known tokens  |  prefix hit: referenced, shared  |  computed by this sequence, private until full  |
    blocks        |  b0  |  b1  |  b2  |  b3  |  b4  |  b5  |  b6  |  b7  |
                                              `- at least the last token is always computed (E6): a hit ends
                                                 at (len - 1) // block_size blocks, so that no shared block is
                                                 written
"""

from __future__ import annotations

import math

from leadline.engine.core.plan import NewSeq, StepPlan, StepRow
from leadline.engine.core.sequence import Sequence, State
from leadline.engine.core.speculation import Speculation
from leadline.engine.core.state import SchedulerState

__all__ = ["LEAST_TOKENS", "Decode", "Prefill", "StepTime"]


LEAST_TOKENS = 64
"""A step computes so many prompt tokens however long they take, so that every prompt makes progress."""
_FIRST_WORK = 1024.0
"""Allowed before any step was measured."""
_WEIGHT = 0.3
"""Of a new measurement, if the step did as much work as one may do."""


class StepTime:
    """Bounds the prompt tokens of a step by time, so that decoding requests soon get their next token.

    A prompt token costs its matrix products, and attention to every token before it. Work counts both in
    units of one token's products:

        work of a chunk [start, start + count)  =  count + attention * count * (start + count / 2)

    `attention`, the cost of one key relative to one token's products, follows from the model's shape
    (`models/cost.py`). The seconds of a unit are measured, by every step that computed prompt tokens.
    `seconds`: what a step may take.
    """

    def __init__(self, seconds: float, attention: float) -> None:
        self._seconds, self._attention = seconds, attention
        self._pace = 0.0
        """Seconds a unit of work, the step's decode rows included; 0.0 until measured."""

    def allowed(self) -> float:
        """Work that a step may do."""
        return max(self._seconds / self._pace, float(LEAST_TOKENS)) if self._pace else _FIRST_WORK

    def work(self, start: int, count: int) -> float:
        """Of a chunk of `count` tokens that begins at position `start`."""
        return count + self._attention * count * (start + count / 2)

    def tokens(self, start: int, work: float) -> int:
        """The most tokens from position `start` on that take no more than `work`."""
        if work <= 0:
            return 0
        linear, square = 1 + self._attention * start, self._attention / 2
        if square == 0:
            return int(work)
        return int((math.sqrt(linear * linear + 4 * square * work) - linear) / (2 * square))

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step that took `seconds`.

        What a step takes beside its prompt tokens counts as part of their pace: where that is a large part,
        smaller chunks have a slower pace, and the size that takes the time allowed is found all the same.
        """
        done = sum(
            self.work(row.start, row.count) for row in plan.rows if row.count > 1 and row.tokens is None
        )
        if not done:
            return
        pace = seconds / done
        if not self._pace:
            self._pace = pace
            return
        # A step may have compiled a kernel, and the last chunk of a prompt may be a few tokens.
        pace = min(max(pace, self._pace / 2), self._pace * 2)
        self._pace += _WEIGHT * min(1.0, done / self.allowed()) * (pace - self._pace)


class Decode:
    """Plans the decode part of steps."""

    def __init__(self, state: SchedulerState, speculation: Speculation) -> None:
        self._state = state
        self._speculation = speculation

    def plan(self, plan: StepPlan) -> tuple[list[StepRow], list[Sequence]]:
        """Rows and their sequences, aligned; blocks appended go into `plan.grown`."""
        self._grow(plan)
        state = self._state
        draft = self._speculation.few_enough(len(state.decoding))
        spare = state.config.max_num_batched_tokens - len(state.decoding)
        rows: list[StepRow] = []
        seqs: list[Sequence] = []
        for seq in state.decoding:
            start = seq.computed
            if start < seq.last_start and not seq.blocked and not (seq.unread and (seq.sync or seq.drafted)):
                row = StepRow(seq.slot, start, 1, True)
                if (seq.may_draft or seq.rewound) and not seq.unread:
                    # Always brought: after a draft the device does not know which token is the last.
                    row.tokens = [seq.token_ids[-1]]
                    seq.rewound = False
                    if draft and spare > 0 and seq.may_draft and not seq.sync:
                        self._draft(seq, row, spare, plan)
                        spare -= row.count - 1
                seq.computed = start + 1
                seq.unread += 1
                rows.append(row)
                seqs.append(seq)
        return rows, seqs

    def _draft(self, seq: Sequence, row: StepRow, spare: int, plan: StepPlan) -> None:
        """Lengthen `row` by drafted tokens: no further than the sequence may grow, and into new blocks only
        while there is one for the next block of every sequence, so that no draft preempts."""
        state, pool = self._state, self._state.pool
        draft = self._speculation.draft(seq, min(spare, seq.last_start - 1 - row.start))
        blocks: list[int] = []
        while row.start + 1 + len(draft) > seq.capacity:
            if pool.num_available <= len(state.decoding):
                draft = draft[: seq.capacity - row.start - 1]
                break
            blocks.append(pool.allocate_one())
            seq.blocks.append(blocks[-1])
            seq.capacity += state.config.block_size
        if blocks:
            _append(plan, seq.slot, blocks)
        if draft:
            assert row.tokens is not None
            row.tokens += draft
            row.count += len(draft)
            seq.drafted = draft

    def _grow(self, plan: StepPlan) -> None:
        """A block for each sequence whose next token's KV starts one, oldest in the decode set first.

        A lone sequence always finds one: `add` caps its length at what the whole pool holds (E21).
        """
        state, pool = self._state, self._state.pool
        full = [
            seq
            for seq in state.decoding
            if seq.computed == seq.capacity
            and seq.computed < seq.last_start
            and not seq.blocked
            and not (seq.unread and (seq.sync or seq.drafted))
        ]
        grown = []
        for seq in full:
            while seq.state is State.RUNNING and not pool.num_available:
                state.preempt(state.policy.victim([*state.decoding, *state.prefilling]))
            if seq.state is State.RUNNING:
                block = pool.allocate_one()
                seq.blocks.append(block)
                seq.capacity += state.config.block_size
                grown.append((seq, block))
        plan.grown.extend((seq.slot, [block]) for seq, block in grown if seq.state is State.RUNNING)


def _append(plan: StepPlan, slot: int, blocks: list[int]) -> None:
    """One entry of `grown` a slot."""
    for known, grown in plan.grown:
        if known == slot:
            grown.extend(blocks)
            return
    plan.grown.append((slot, blocks))


class Prefill:
    """Plans the prefill part of steps; also keeps the prefix cache's hit statistics."""

    def __init__(self, state: SchedulerState, step_time: StepTime | None = None) -> None:
        """step_time: bounds what a step computes while interactive requests decode."""
        self._state = state
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
        state = self._state
        policy = state.policy
        self._starts = {}
        self._work_left = math.inf
        if self._step_time is not None and any(seq.priority_class == "interactive" for seq in state.decoding):
            self._work_left = self._step_time.allowed()
        policy.begin_step(budget, {seq.priority_class for seq in state.prefilling})
        budget = self._round(plan, budget, now, may_admit)
        if budget > 0:
            policy.lift_limits()
            self._round(plan, budget, now, may_admit)
        return self._rows()

    def _round(self, plan: StepPlan, budget: int, now: float, may_admit: bool) -> int:
        """One round over running prefills, then waiting sequences; returns the budget left."""
        state = self._state
        for seq in state.prefilling:
            if budget <= 0:
                return budget
            budget -= self._grant(seq, budget)
        while may_admit and budget > 0 and self._work_left > 0 and state.free_slots:
            candidate = state.policy.peek()
            if candidate is None or state.policy.limit(candidate) < 1:
                break
            if self._park(candidate):
                continue
            if not self._admit(candidate, plan, now):
                break
            budget -= self._grant(candidate, budget)
            if state.config.prefix_caching:
                state.dedup.own(candidate, candidate.committed, len(candidate.hashes))
        return budget

    def _park(self, seq: Sequence) -> bool:
        """Let `seq` wait for blocks that a running sequence is about to compute (E7)."""
        state = self._state
        if not state.config.prefix_caching or seq.wants_prompt_logprobs:
            return False
        state.extend_hashes(seq, len(seq.token_ids) // state.config.block_size)
        usable = self._usable(seq)
        first = len(state.pool.match(seq.hashes, usable))
        if not state.dedup.park(seq, first, usable):
            return False
        state.policy.withdraw(seq)
        return True

    def _usable(self, seq: Sequence) -> int:
        """Blocks a prefix hit may cover."""
        return (len(seq.token_ids) - 1) // self._state.config.block_size

    def _admit(self, seq: Sequence, plan: StepPlan, now: float) -> bool:
        """Give `seq` a slot and all blocks of its known tokens, if there are enough."""
        state, pool = self._state, self._state.pool
        hits: list[int] = []
        if state.config.prefix_caching:
            state.extend_hashes(seq, len(seq.token_ids) // state.config.block_size)
            if not seq.wants_prompt_logprobs:
                hits = pool.match(seq.hashes, self._usable(seq))
        missing = -(-len(seq.token_ids) // state.config.block_size) - len(hits)
        if missing + pool.num_unreferenced(hits) > pool.num_available - self._headroom():
            return False
        pool.acquire(hits)
        state.admit(seq, hits + pool.allocate(missing), len(hits))
        self._enter(seq, plan, now)
        return True

    def _headroom(self) -> int:
        """Blocks kept back for the growth of running sequences: admission should not cause preemption."""
        state = self._state
        return min(len(state.decoding), state.pool.num_blocks // 32)

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
        state = self._state
        start = self._starts.get(seq, seq.computed)
        count = min(budget, seq.prefill_left, state.policy.limit(seq))
        if state.config.prefill_chunk is not None:
            count = min(count, start + state.config.prefill_chunk - seq.computed)
        if self._step_time is not None and self._work_left < math.inf:
            count = self._within_time(self._step_time, seq.computed, count)
        if seq.blocked and count == seq.prefill_left:
            count -= 1  # the last one samples
        if count <= 0:
            return 0
        self._starts[seq] = start
        seq.computed += count
        state.policy.charge(seq, count)
        if seq.computed >= seq.commit_at:
            state.commit(seq, seq.computed)
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
        """Return the step's grants as rows. A sequence whose known tokens are all planned samples, and
        decodes from now on."""
        state = self._state
        rows, seqs = [], []
        for seq, start in self._starts.items():
            done = not seq.prefill_left
            wants = seq.wants_prompt_logprobs and start < len(seq.request.prompt_token_ids)
            rows.append(StepRow(seq.slot, start, seq.computed - start, done, wants))
            seqs.append(seq)
            if done:
                seq.unread += 1
                del state.prefilling[seq]
                state.decoding[seq] = None
        return rows, seqs


def _banned(seq: Sequence) -> tuple[int, ...]:
    """Tokens that would stop `seq`, but for those that may be forced: the end of a thought."""
    thought = seq.request.thought
    return tuple(seq.stop_ids.difference(() if thought is None else thought.closing))
