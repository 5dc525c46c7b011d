"""Decode: one row for every running sequence whose known tokens are computed, in every step (E20).

First all blocks that this step's decodes need are found, by preemption if nothing is free; only then are rows
planned, so that no row of a preempted sequence has to be taken back.
"""

from __future__ import annotations

from leadline.engine.core.books import Books
from leadline.engine.core.plan import StepPlan, StepRow
from leadline.engine.core.sequence import Sequence, State

__all__ = ["Decode"]


class Decode:
    """Plans the decode part of steps."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def plan(self, plan: StepPlan) -> tuple[list[StepRow], list[Sequence]]:
        """Rows and their sequences, aligned; blocks appended go into `plan.grown`."""
        self._grow(plan)
        rows: list[StepRow] = []
        seqs: list[Sequence] = []
        for seq in self._books.decoding:
            start = seq.computed
            if start < seq.last_start and not (seq.unread and seq.sync):
                seq.computed = start + 1
                seq.unread += 1
                rows.append(StepRow(seq.slot, start, 1, True))
                seqs.append(seq)
        return rows, seqs

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
            and not (seq.unread and seq.sync)
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
