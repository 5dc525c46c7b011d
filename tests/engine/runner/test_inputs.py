"""Slot tables and step inputs against a naive statement, one token at a time, under random plans."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.engine.core.plan import NewSeq, StepPlan, StepRow
from leadline.engine.runner.inputs import InputBuilder
from leadline.engine.runner.slots import SlotTables
from leadline.engine.sampling_params import SamplingParams

CPU = torch.device("cpu")
SLOTS, MAX_LEN, SIZE = 6, 256, 16


class Model:
    """What a slot should hold, in plain lists."""

    def __init__(self, tokens: list[int], blocks: list[int]) -> None:
        self.tokens, self.blocks, self.computed = tokens, blocks, 0


def check(inputs, plan: StepPlan, live: dict[int, Model]) -> None:
    ids, positions, mapping, last = [], [], [], []
    for row in plan.rows:
        model = live[row.slot]
        for position in range(row.start, row.start + row.count):
            if row.tokens is not None:
                ids.append(row.tokens[position - row.start])
            else:
                ids.append(model.tokens[position] if position < len(model.tokens) else -1)
            positions.append(position)
            mapping.append(model.blocks[position // SIZE] * SIZE + position % SIZE)
        last.append(len(ids) - 1)
    batch = inputs.batch
    assert inputs.input_ids.tolist() == ids
    assert inputs.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == mapping
    assert batch.cu_q.tolist() == [0, *(index + 1 for index in last)]
    assert batch.cu_q.dtype == batch.context_lens.dtype == batch.block_tables.dtype == torch.int32
    contexts = [row.start + row.count for row in plan.rows]
    assert batch.context_lens.tolist() == batch.context_lens_host == contexts
    assert batch.query_lens_host == [row.count for row in plan.rows]
    assert (batch.num_rows, batch.num_tokens) == (len(plan.rows), len(ids))
    assert batch.num_decodes == inputs.num_ones == sum(row.count == 1 for row in plan.rows)
    assert batch.max_context_len == max(contexts)
    width = -(-max(contexts) // SIZE)
    for i, row in enumerate(plan.rows):
        used = -(-contexts[i] // SIZE)
        expected = live[row.slot].blocks[:used] + [0] * (width - used)
        assert batch.block_tables[i].tolist()[:width] == expected
    sampled = [
        (row.slot, contexts[i] - back, last[i] - back)
        for i, row in enumerate(plan.rows)
        if row.sample
        for back in reversed(range(1 if row.tokens is None else row.count))
    ]
    assert inputs.host_sample_slots.tolist() == inputs.sample_slots.tolist()
    index = list(range(len(ids))) if inputs.sample_tokens is None else inputs.sample_tokens.tolist()
    found = zip(inputs.sample_slots.tolist(), inputs.sample_positions.tolist(), index, strict=True)
    assert list(found) == sampled


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_inputs_say_what_a_plan_means_token_by_token(rng):
    tables = SlotTables(SLOTS, MAX_LEN // SIZE, CPU)
    builder = InputBuilder(tables, SIZE)
    live: dict[int, Model] = {}
    next_block = 1
    for step in range(12):
        plan = StepPlan(step)
        for slot in list(live):
            if rng.random() < 0.15:
                del live[slot]
                plan.released.append(slot)
        for slot in range(SLOTS):
            if slot not in live and rng.random() < 0.5:
                length = rng.randint(1, 70)
                count = -(-length // SIZE)
                blocks = list(range(next_block, next_block + count))
                next_block += count
                rng.shuffle(blocks)
                live[slot] = Model([rng.randrange(1000) for _ in range(length)], blocks)
                plan.entered.append(
                    NewSeq(slot, slot, live[slot].tokens, length, SamplingParams(), 0, list(blocks))
                )
        ones, longs = [], []
        for slot, model in live.items():
            if rng.random() < 0.3:
                continue
            left = len(model.tokens) - model.computed
            count = rng.randint(1, left) if left > 0 else 1
            if model.computed + count > MAX_LEN:
                continue
            added = []
            while len(model.blocks) * SIZE < model.computed + count:
                added.append(next_block)
                model.blocks.append(next_block)
                next_block += 1
            if added:
                plan.grown.append((slot, added))
            sample = model.computed + count >= len(model.tokens)
            row = StepRow(slot, model.computed, count, sample)
            if left <= 0 and rng.random() < 0.5:  # a draft: the last token and up to three more
                room = min(MAX_LEN, len(model.blocks) * SIZE) - model.computed
                row.count = rng.randint(1, min(4, room))
                row.tokens = [rng.randrange(1000) for _ in range(row.count)]
            (ones if row.count == 1 else longs).append(row)
            model.computed += row.count
        plan.rows = ones + longs
        tables.apply(plan)
        if plan.rows:
            check(builder.build(plan), plan, live)


def test_a_slot_that_changes_hands_keeps_nothing_of_its_last_owner():
    tables = SlotTables(2, MAX_LEN // SIZE, CPU)
    builder = InputBuilder(tables, SIZE)
    old = NewSeq(1, 0, list(range(100)), 100, SamplingParams(), 0, [9, 8, 7, 6, 5, 4, 3])
    tables.apply(StepPlan(0, entered=[old]))
    other = NewSeq(0, 1, list(range(60)), 60, SamplingParams(), 0, [10, 11, 12, 13])
    new = NewSeq(1, 2, [5, 6], 2, SamplingParams(), 0, [14])
    plan = StepPlan(1, released=[1], entered=[other, new])
    plan.rows = [StepRow(1, 2, 1, True), StepRow(0, 0, 60, True)]
    tables.apply(plan)
    inputs = builder.build(plan)
    assert inputs.input_ids[0].item() == -1, "the new owner's third token is on the device, not the old one's"
    assert inputs.batch.block_tables.tolist() == [[14, 0, 0, 0], [10, 11, 12, 13]]
    assert np.array_equal(inputs.host_slots, [1, 0])
