"""Decode: one row for every running sequence whose known tokens are computed, in every step (E20).

First all blocks that this step's decodes need are found, by preemption if nothing is free; only then are rows
planned, so that no row of a preempted sequence has to be taken back.
"""

from __future__ import annotations

from leadline.engine.core.books import Books
from leadline.engine.core.plan import StepPlan, StepRow
from leadline.engine.core.sequence import Sequence, State
from leadline.engine.core.speculation import Speculation

__all__ = ["Decode"]


class Decode:
    """Plans the decode part of steps."""

    def __init__(self, books: Books, speculation: Speculation) -> None:
        self._books = books
        self._speculation = speculation

    def plan(self, plan: StepPlan) -> tuple[list[StepRow], list[Sequence]]:
        """Rows and their sequences, aligned; blocks appended go into `plan.grown`."""
        self._grow(plan)
        books = self._books
        draft = self._speculation.few_enough(len(books.decoding))
        spare = books.config.max_num_batched_tokens - len(books.decoding)
        rows: list[StepRow] = []
        seqs: list[Sequence] = []
        for seq in books.decoding:
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
        while there is one for everybody's next, so that no draft preempts."""
        books, pool = self._books, self._books.pool
        draft = self._speculation.draft(seq, min(spare, seq.last_start - 1 - row.start))
        blocks: list[int] = []
        while row.start + 1 + len(draft) > seq.capacity:
            if pool.num_available <= len(books.decoding):
                draft = draft[: seq.capacity - row.start - 1]
                break
            blocks.append(pool.allocate_one())
            seq.blocks.append(blocks[-1])
            seq.capacity += books.config.block_size
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
        books, pool = self._books, self._books.pool
        full = [
            seq
            for seq in books.decoding
            if seq.computed == seq.capacity
            and seq.computed < seq.last_start
            and not seq.blocked
            and not (seq.unread and (seq.sync or seq.drafted))
        ]
        grown = []
        for seq in full:
            while seq.state is State.RUNNING and not pool.num_available:
                books.preempt(books.policy.victim([*books.decoding, *books.prefilling]))
            if seq.state is State.RUNNING:
                block = pool.allocate_one()
                seq.blocks.append(block)
                seq.capacity += books.config.block_size
                grown.append((seq, block))
        plan.grown.extend((seq.slot, [block]) for seq, block in grown if seq.state is State.RUNNING)


def _append(plan: StepPlan, slot: int, blocks: list[int]) -> None:
    """One entry of `grown` a slot."""
    for known, grown in plan.grown:
        if known == slot:
            grown.extend(blocks)
            return
    plan.grown.append((slot, blocks))
