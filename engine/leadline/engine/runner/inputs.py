"""StepPlan to StepInputs: positions, slot mapping, attention shapes, and where each row's input token comes
from.

Rows are packed without padding, rows of one token first:

    row            0    1    2        3                4
    count          1    1    1        5                3
    cu_q           0    1    2        3                8        11
    tokens         d    d    h        h h h h h        h h h
                   |    |    `- known on the host (NewSeq.token_ids, StepRow.tokens): its id is uploaded
                   `----`- sampled by an earlier step: uploaded as -1, filled from last_token[slot] on the
                   device
    samples                                    `        ` ` `
                                               the last of a row, or each of a row that drafts

Everything goes up in two copies from pinned memory: one int64 buffer, one int32 buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from leadline.engine.attention.interface import AttentionBatch
from leadline.engine.core.plan import StepPlan
from leadline.engine.runner.slots import SlotTables
from leadline.engine.sampling.slot_rows import upload

__all__ = ["InputBuilder", "StepInputs"]


@dataclass(slots=True)
class StepInputs:
    """One step, ready for the device. T tokens in R rows, S of which are sampled."""

    input_ids: torch.Tensor
    """int64 [T]; -1 where the id is last_token of the row's slot"""
    positions: torch.Tensor
    """int64 [T]"""
    slots: torch.Tensor
    """int64 [R]"""
    num_ones: int
    """Rows of one token; they come first, and only they can hold a -1."""
    batch: AttentionBatch
    sample_tokens: torch.Tensor | None
    """int64 [S] index into the T tokens of each one to be sampled after; None when row i is token i for all
    rows."""
    sample_slots: torch.Tensor
    """int64 [S]; a slot stands in it once for each token that its row samples"""
    sample_positions: torch.Tensor
    """int64 [S]: where the sampled tokens will stand"""
    host_slots: np.ndarray
    """int64 [R]"""
    host_sample_slots: np.ndarray
    """int64 [S]"""
    host_cu_q: np.ndarray
    """int64 [R + 1]"""


class InputBuilder:
    """Builds StepInputs from plans whose changes the tables have applied already."""

    def __init__(self, tables: SlotTables, block_size: int) -> None:
        self.tables = tables
        self.block_size = block_size

    def build(self, plan: StepPlan) -> StepInputs:
        """No per-token Python; per row only the reading of the plan itself."""
        tables, size, device = self.tables, self.block_size, self.tables.device
        rows = plan.rows
        fields = np.array([(row.slot, row.start, row.count, row.sample) for row in rows], dtype=np.int64)
        slots, starts, counts, sampled = fields.T
        ends = starts + counts
        num_rows, num_ones = len(rows), int((counts == 1).sum())
        cu_q = np.zeros(num_rows + 1, dtype=np.int64)
        np.cumsum(counts, out=cu_q[1:])
        tokens = int(cu_q[-1])

        if num_ones == num_rows:
            positions, token_slots = starts, slots
        else:
            positions = np.arange(tokens) + np.repeat(starts - cu_q[:-1], counts)
            token_slots = np.repeat(slots, counts)
        blocks = tables.block_tables[token_slots, positions // size].astype(np.int64)
        slot_mapping = blocks * size + positions % size

        ids = np.full(tokens, -1, dtype=np.int64)
        for row in np.flatnonzero(starts < tables.known[slots]):
            known = tables.tokens[slots[row]]
            ids[cu_q[row] : cu_q[row + 1]] = known[starts[row] : ends[row]]
        for row, given in enumerate(rows):
            if given.tokens is not None:
                ids[cu_q[row] : cu_q[row + 1]] = given.tokens

        which = np.flatnonzero(sampled)
        every_row = num_ones == num_rows == len(which)
        sample_slots, sample_positions, sample_tokens = slots[which], ends[which], cu_q[1:][which] - 1
        if any(row.num_samples > 1 for row in rows):
            samples = np.array([row.num_samples for row in rows], dtype=np.int64)[which]
            # Counted back from each row's last token.
            back = np.repeat(np.cumsum(samples), samples) - np.arange(samples.sum()) - 1
            sample_slots = np.repeat(sample_slots, samples)
            sample_positions = np.repeat(sample_positions, samples) - back
            sample_tokens = np.repeat(sample_tokens, samples) - back
        parts = [ids, positions, slot_mapping, slots, sample_slots, sample_positions, sample_tokens]
        lengths = [len(part) for part in parts]
        wide = upload(np.concatenate(parts), device).split(lengths)
        narrow = upload(np.concatenate([cu_q, ends]).astype(np.int32), device)
        longest = int(ends.max())
        table_rows = tables.device_tables[:, : -(-longest // size)].index_select(0, wide[3])
        batch = AttentionBatch(
            num_rows=num_rows,
            num_decodes=num_ones,
            num_tokens=tokens,
            cu_q=narrow[: num_rows + 1],
            context_lens=narrow[num_rows + 1 :],
            block_tables=self._cut(table_rows, ends),
            slot_mapping=wide[2],
            query_lens_host=counts.tolist(),
            context_lens_host=ends.tolist(),
            max_query_len=int(counts.max()),
            max_context_len=longest,
        )
        return StepInputs(
            input_ids=wide[0],
            positions=wide[1],
            slots=wide[3],
            num_ones=num_ones,
            batch=batch,
            sample_tokens=None if every_row else wide[6],
            sample_slots=wide[4],
            sample_positions=wide[5],
            host_slots=slots,
            host_sample_slots=sample_slots,
            host_cu_q=cu_q,
        )

    def _cut(self, table_rows: torch.Tensor, ends: np.ndarray) -> torch.Tensor:
        """Zero the entries past each row's context, as the interface promises.

        They are blocks the row has not reached, or were left there by an earlier owner of its slot.
        """
        used = (ends + self.block_size - 1) // self.block_size
        if int(used.min()) == int(used.max()):
            return table_rows
        width = torch.arange(table_rows.shape[1], device=table_rows.device)
        return table_rows.masked_fill_(width >= upload(used, table_rows.device)[:, None], 0)
