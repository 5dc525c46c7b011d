"""A step of decode rows and chunks as several graphs, where those take less time than one eager step.

    rows of the plan    | d d d d d | chunk | chunk |      no graph has such a mixture
    pieces              | d d d d d | chunk | chunk |      each piece has one
    order of work            3           1       2

An eager step takes what the host needs to launch it or what the GPU needs to compute it, whichever is longer.
Pieces take next to nothing of the host, but each reads all weights. What a graph takes is measured when it
has been captured (`StepCosts`).

Within one step, a row may read KV that another row writes: in a layer, all of it is written before any row
attends. Pieces have no such order. So a step is left whole when a sequence that enters hits a block which
this very step computes (docs/decisions/001).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace

import numpy as np

from leadline.engine.core.plan import StepHandle, StepPlan, StepResult, StepRow
from leadline.engine.runner.slots import SlotTables

__all__ = ["JoinedHandles", "StepCosts", "StepSplitter"]


@dataclass(slots=True, frozen=True)
class StepCosts:
    """In microseconds; the same on all ranks, so that they split alike."""

    launch: int
    """What the host needs to launch an eager step."""
    decode: dict[int, int]
    """By rows of the graph, ascending."""
    chunk: dict[int, int]
    """By tokens of the graph, ascending."""

    def of_decode(self, rows: int) -> int | None:
        """None: no graph has so many."""
        return _next(self.decode, rows)

    def of_chunk(self, tokens: int) -> int | None:
        return _next(self.chunk, tokens)

    def of_eager(self, tokens: int) -> int:
        """Beyond the longest graph, time grows with the tokens."""
        longest = max(self.chunk)
        computing = self.of_chunk(tokens) or self.chunk[longest] * tokens // longest
        return max(self.launch, computing)


def _next(costs: dict[int, int], size: int) -> int | None:
    sizes = list(costs)
    index = bisect.bisect_left(sizes, size)
    return costs[sizes[index]] if index < len(sizes) else None


class StepSplitter:
    """Splits the plans of one runner."""

    def __init__(self, tables: SlotTables, block_size: int, costs: StepCosts) -> None:
        """`costs` must have at least one chunk."""
        self.tables, self.block_size, self.costs = tables, block_size, costs

    def split(self, plan: StepPlan) -> list[StepPlan]:
        """The plan itself; or pieces in the order of its rows, to be launched from the second to the last and
        then the first. The tables have applied the changes of a plan that is not returned as it is."""
        decodes = 0
        while decodes < len(plan.rows) and _decodes(plan.rows[decodes]):
            decodes += 1
        chunks = plan.rows[decodes:]
        if not self._pays(plan, plan.rows[:decodes], chunks):
            return [plan]
        self.tables.apply(plan)
        whole = replace(plan, released=[], entered=[], grown=[])
        if self._reads_what_it_writes(plan):
            return [whole]
        parts = [plan.rows[:decodes]] if decodes else []
        parts += [[row] for row in chunks]
        return [_piece(whole, rows) for rows in parts]

    def _pays(self, plan: StepPlan, decodes: list[StepRow], chunks: list[StepRow]) -> bool:
        if not chunks or len(chunks) + bool(decodes) < 2:
            return False
        total = 0
        if decodes:
            cost = self.costs.of_decode(sum(row.count for row in decodes))
            if cost is None:
                return False
            total = cost
        for row in chunks:
            cost = self.costs.of_chunk(row.count)
            if cost is None or row.count == 1 or row.prompt_logprobs or row.tokens is not None:
                return False
            total += cost
        return total < self.costs.of_eager(plan.num_tokens)

    def _reads_what_it_writes(self, plan: StepPlan) -> bool:
        """Whether a sequence that enters has blocks in common that this step computes."""
        size, blocks = self.block_size, self.tables.block_tables
        entered = {seq.slot for seq in plan.entered}
        read = [blocks[row.slot, : row.start // size] for row in plan.rows if row.slot in entered]
        if not any(len(part) for part in read):
            return False
        written = [
            blocks[row.slot, row.start // size : (row.start + row.count - 1) // size + 1] for row in plan.rows
        ]
        return bool(np.isin(np.concatenate(read), np.concatenate(written)).any())


def _decodes(row: StepRow) -> bool:
    """What a decode graph computes: see `DecodeGraphs.run`."""
    return row.sample and not row.prompt_logprobs and row.num_samples == row.count


def _piece(plan: StepPlan, rows: list[StepRow]) -> StepPlan:
    slots = {row.slot for row in rows}
    masks = {slot: mask for slot, mask in plan.masks.items() if slot in slots}
    return StepPlan(plan.step_id, rows=rows, masks=masks)


@dataclass(slots=True)
class JoinedHandles:
    """A step launched in pieces. `parts` in the order of the plan's rows, which is not that of launching."""

    step_id: int
    parts: list[StepHandle]

    def wait(self) -> StepResult:
        joined = StepResult(self.step_id, [], [])
        for part in self.parts:
            result = part.wait()
            joined.tokens += result.tokens
            joined.logprobs += result.logprobs
            joined.prompt_logprobs |= result.prompt_logprobs
        return joined
