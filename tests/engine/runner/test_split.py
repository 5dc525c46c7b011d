"""When a step of decode rows and chunks becomes several, and what becomes of its plan."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from leadline.engine.core.plan import NewSeq, StepPlan, StepResult, StepRow
from leadline.engine.runner.slots import SlotTables
from leadline.engine.runner.split import JoinedHandles, StepCosts, StepSplitter
from leadline.engine.sampling_params import SamplingParams

COSTS = StepCosts(launch=1000, decode={1: 200, 8: 300}, chunk={64: 250, 128: 400, 256: 900})
GREEDY = SamplingParams(temperature=0)


def decode(slot: int, start: int = 40) -> StepRow:
    return StepRow(slot, start, 1, True)


def chunk(slot: int, count: int, start: int = 0) -> StepRow:
    return StepRow(slot, start, count, True)


def entering(slot: int, tokens: int, blocks: list[int]) -> NewSeq:
    return NewSeq(slot, slot, [7] * tokens, tokens, GREEDY, 0, blocks)


@pytest.fixture
def splitter() -> StepSplitter:
    """Slots 0 to 2 hold sequences of three blocks of 16."""
    tables = SlotTables(16, 64, torch.device("cpu"))
    running = [entering(slot, 30, [10 * slot, 10 * slot + 1, 10 * slot + 2]) for slot in range(3)]
    tables.apply(StepPlan(0, entered=running))
    return StepSplitter(tables, 16, COSTS)


@pytest.mark.parametrize(
    ("rows", "split"),
    [
        pytest.param([decode(0), decode(1)], False, id="decode rows have a graph"),
        pytest.param([chunk(3, 100)], False, id="so has a chunk"),
        pytest.param([decode(0), chunk(3, 100)], True, id="300 + 400 are less than 1000"),
        pytest.param([decode(0), chunk(3, 128), chunk(4, 50)], True, id="200 + 400 + 250"),
        pytest.param([decode(0), decode(1), chunk(3, 128), chunk(4, 128)], False, id="300 + 400 + 400"),
        pytest.param([chunk(3, 60), chunk(4, 60)], True, id="chunks alone"),
        pytest.param([decode(0), chunk(3, 300)], False, id="no graph is so long"),
        pytest.param([*(decode(slot) for slot in range(9)), chunk(10, 60)], False, id="nor has so many rows"),
        pytest.param([decode(0), chunk(3, 256)], False, id="200 + 900, and 257 tokens take the GPU 903"),
        pytest.param([decode(0), StepRow(3, 0, 60, True, prompt_logprobs=True)], False, id="prompt_logprobs"),
        pytest.param([decode(0), StepRow(3, 0, 1, False), chunk(4, 60)], False, id="a chunk of one token"),
        pytest.param([StepRow(0, 40, 3, True, tokens=[1, 2, 3]), chunk(3, 60)], True, id="drafts decode"),
        pytest.param([chunk(3, 60), StepRow(0, 40, 3, True, tokens=[1, 2, 3])], False, id="not in order"),
        pytest.param([decode(0), StepRow(3, 0, 60, False)], True, id="a chunk that does not sample"),
    ],
)
def test_steps_are_split_where_that_is_faster(splitter: StepSplitter, rows: list[StepRow], split: bool):
    entered = [entering(row.slot, row.count, [40 + row.slot] * 16) for row in rows if row.slot > 2]
    plan = StepPlan(5, entered=entered, rows=rows)
    pieces = splitter.split(plan)
    assert (len(pieces) > 1) == split
    assert [row for piece in pieces for row in piece.rows] == rows
    if not split:
        assert pieces[0] is plan


def test_a_long_step_is_bound_by_the_gpu(splitter: StepSplitter):
    """Where graphs of both halves take less than twice 900."""
    splitter.costs = dataclasses.replace(COSTS, launch=10)
    rows = [chunk(3, 128), chunk(4, 128), chunk(5, 128), chunk(6, 128)]
    assert splitter.costs.of_eager(512) == 1800
    assert len(splitter.split(StepPlan(1, entered=[entering(3, 128, [50])], rows=rows))) == 4


def test_changes_are_applied_once_and_masks_go_with_their_rows(splitter: StepSplitter):
    mask = np.zeros(4, dtype=np.int32)
    plan = StepPlan(
        5,
        released=[9],
        entered=[entering(3, 50, [30, 31, 32, 33])],
        grown=[(0, [77])],
        rows=[decode(0, 48), decode(1), chunk(3, 50)],
        masks={1: mask, 3: mask + 1},
    )
    pieces = splitter.split(plan)
    assert [[row.slot for row in piece.rows] for piece in pieces] == [[0, 1], [3]]
    assert [sorted(piece.masks) for piece in pieces] == [[1], [3]]
    assert all(piece.step_id == 5 for piece in pieces)
    assert not any(piece.released or piece.entered or piece.grown for piece in pieces)
    assert splitter.tables.block_tables[0, 3] == 77
    assert splitter.tables.block_tables[3, :4].tolist() == [30, 31, 32, 33]


@pytest.mark.parametrize(
    ("shared", "whole"),
    [
        pytest.param([2], True, id="of a decode row"),
        pytest.param([30, 31], True, id="of a chunk"),
        pytest.param([0, 1], False, id="of a running sequence, computed before"),
    ],
)
def test_a_step_stays_whole_if_a_prefix_hit_is_a_block_it_computes(
    splitter: StepSplitter, shared: list[int], whole: bool
):
    hit = 16 * len(shared)
    plan = StepPlan(
        5,
        entered=[entering(3, 40, [30, 31, 32]), entering(4, hit + 20, [*shared, 44, 45])],
        rows=[decode(0), chunk(3, 40), chunk(4, 20, hit)],
    )
    pieces = splitter.split(plan)
    assert len(pieces) == (1 if whole else 3)
    assert [row for piece in pieces for row in piece.rows] == plan.rows
    assert not any(piece.entered for piece in pieces), "the tables have them"
    assert splitter.tables.block_tables[4, : len(shared)].tolist() == shared


class Handle:
    def __init__(self, result: StepResult) -> None:
        self.result = result

    def wait(self) -> StepResult:
        return self.result


def test_results_come_in_the_order_of_the_rows():
    parts = [
        Handle(StepResult(5, [1, 2], [None, None])),
        Handle(StepResult(5, [], [], {7: []})),
        Handle(StepResult(5, [3], [None])),
    ]
    assert JoinedHandles(5, parts).wait() == StepResult(5, [1, 2, 3], [None] * 3, {7: []})
