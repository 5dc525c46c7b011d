"""Steps as CUDA graphs: captured once for a ladder of sizes, replayed at the next size up.

Decode steps are here; steps of one chunk are in prefill.py and share everything but their inputs.

    host     one pinned upload, one graph launch
    device   fill buffers ─▶ embedding ─▶ layers ─▶ logits ─▶ draw tokens, write last_token

A decode graph is fit for a plan whose rows all have one query token and all sample. Greedy rows and rows
with a temperature get their token inside the graph; where a row needs more (penalties, truncation, bias,
masks, log-probabilities) the graph's logits go on to the eager sampler, whose tokens overwrite the graph's.

All graphs share what context.py holds.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from triton.runtime.errors import OutOfResources

from leadline.engine.attention import AttentionBackend
from leadline.engine.core.plan import StepPlan
from leadline.engine.models.base import CausalLM, KVWrite
from leadline.engine.runner.graphs.buffers import DecodeBuffers, DecodeRows
from leadline.engine.runner.graphs.context import GraphContext
from leadline.engine.runner.graphs.prefill import PrefillGraphs
from leadline.engine.runner.slots import SlotTables
from leadline.engine.runner.split import StepCosts
from leadline.engine.sampling import Sampler
from leadline.engine.sampling.state import RANDOM

__all__ = ["CaptureReport", "DecodeGraphs", "GraphStep", "graph_sizes"]

logger = logging.getLogger("leadline.engine.runner")


def graph_sizes(max_rows: int) -> list[int]:
    """Batch sizes to capture, ascending: 1, 2, 4, by 8 to 96, by 16 to 256, by 64 above, and max_rows.

    A padded row costs its share of the matrix products and no KV reads.
    """
    ladder = [1, 2, 4, *range(8, 96, 8), *range(96, 256, 16), *range(256, max_rows, 64)]
    return [size for size in ladder if size < max_rows] + [max_rows]


@dataclass(slots=True, frozen=True)
class CaptureReport:
    """What capturing cost."""

    graphs: int
    """of decode steps"""
    prefill_graphs: int
    seconds: float
    bytes: int
    """Device memory: graphs, their shared pool and the static buffers."""


@dataclass(slots=True)
class GraphStep:
    """A replayed step. `logits` [R, V] and `tokens` int64 [R] are overwritten by the next replay."""

    slots: np.ndarray
    """int64 [R], those that sample"""
    positions: np.ndarray
    """int64 [R]: where the sampled tokens will stand"""
    logits: torch.Tensor
    tokens: torch.Tensor


class DecodeGraphs:
    """Graphs of one runner. Nothing is captured before `capture`."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        kv_cache: list[tuple[torch.Tensor, torch.Tensor]],
        tables: SlotTables,
        sampler: Sampler,
        *,
        windows: tuple[int | None, ...],
        block_size: int,
        max_model_len: int,
        max_tokens: int,
        least: Callable[[int], int] = int,
    ) -> None:
        """windows: of each layer. max_tokens: most tokens of one chunk. least: see GraphContext. Raises
        ValueError for a backend that cannot be captured."""
        if backend.graph_padding is None:
            raise ValueError(f"attention backend {backend.name!r} cannot be captured in a CUDA graph")
        max_rows = len(tables.known)
        self.tables, self.sampler, self.block_size = tables, sampler, block_size
        self.sizes = graph_sizes(max_rows)
        self.buffers = DecodeBuffers(tables, max_rows, block_size, backend.graph_padding)
        self.context = GraphContext(
            model,
            backend,
            kv_cache,
            tables,
            sampler,
            windows,
            block_size=block_size,
            max_model_len=max_model_len,
            least=least,
        )
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.prefill = PrefillGraphs(self.context, max_tokens if backend.graph_chunks else 0)

    # -- capture ---------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, *, everything: bool = True) -> CaptureReport:
        """Capture, the largest first, so that the pool is big enough at once; or only the largest of each.

        Steps of padding rows are run meanwhile: tables, cache and last tokens stay as they are.
        """
        began, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        self.prefill.settle_lengths()
        lengths, sizes = self.prefill.lengths[::-1], self.sizes[::-1]
        if not everything:
            lengths, sizes = lengths[:1], sizes[:1]
        for length in lengths:
            self.prefill.capture(length)
        for size in sizes:
            self._capture(size)
        torch.cuda.synchronize()
        used = free - torch.cuda.mem_get_info()[0]
        return CaptureReport(len(sizes), len(lengths), time.perf_counter() - began, used)

    def _capture(self, size: int) -> None:
        """Where two ways through the layers can serve `size` rows, capture both and keep the faster."""
        self.buffers.send(None, size)
        few = self.context.model.few_rows
        if few is None or not few.may_take(size):
            self._graphs[size] = self.context.capture(lambda: self._step(size))
            return
        graphs = {}
        for here in (True, False):
            few.choose(size, here)
            # A cut that was never tried on this GPU may need more shared memory than it has.
            with contextlib.suppress(OutOfResources):
                graphs[here] = self.context.capture(lambda: self._step(size))
        times = {here: self.context.microseconds(graph) for here, graph in graphs.items()}
        best = min(times, key=times.__getitem__)
        few.choose(size, best)
        self._graphs[size] = graphs[best]

    def _step(self, size: int) -> None:
        """What a graph holds. Allocates nothing that outlives it."""
        buffers, context, model = self.buffers, self.context, self.context.model
        buffers.fill(size)
        written = model.writes_kv
        batch = buffers.batch(size, context.max_model_len, written)
        context.backend.begin(batch)
        write = KVWrite(context.kv_cache, batch.slot_mapping) if written else None
        hidden = model.forward(buffers.ids[:size], buffers.positions[:size], context.attend, write)
        logits = model.compute_logits(hidden, context.logits[:size])
        context.draw(logits, buffers.slots, buffers.next_positions, buffers.random)

    def costs(self) -> StepCosts:
        """What captured steps of padding take, once `capture` has captured everything."""
        decode = {}
        for size in self.sizes:
            self.buffers.send(None, size)
            decode[size] = self.context.microseconds(self._graphs[size])
        return StepCosts(self.prefill.launch_us, decode, self.prefill.costs())

    def clear(self) -> None:
        """Destroy all graphs; what still runs of them ends first. Final."""
        self._graphs.clear()
        self.prefill.clear()

    # -- replay ----------------------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> GraphStep | None:
        """Apply the plan to the tables and replay its graph; None, and nothing done, if none fits."""
        rows = plan.rows
        if (
            all(row.sample and not row.prompt_logprobs and row.num_samples == row.count for row in rows)
            and plan.num_tokens <= self.sizes[-1]
        ):
            return self._run_decode(plan)
        if not self.prefill.fits(plan):
            return None
        self.tables.apply(plan)
        self.prefill.replay(plan)
        (row,) = rows
        count = int(row.sample)
        return GraphStep(
            np.array([row.slot] * count, dtype=np.int64),
            np.array([row.start + row.count] * count, dtype=np.int64),
            self.context.logits[:count],
            self.context.tokens[:count],
        )

    def _run_decode(self, plan: StepPlan) -> GraphStep:
        """A block that a row of this step is the first to use goes up with the row. A row that drafts is as
        many decode rows of one slot: each layer's KV is written before any of them attends."""
        self.tables.apply(plan, grow_device=False)
        rows = self._read(plan)
        if plan.grown and not self._grows_by_itself(plan, rows):
            self.tables.grow_device(plan.grown)
        count = len(rows.slots)
        size = self.sizes[bisect.bisect_left(self.sizes, count)]
        self.buffers.send(rows, size)
        self._graphs[size].replay()
        context = self.context
        return GraphStep(rows.slots, rows.starts + 1, context.logits[:count], context.tokens[:count])

    def _read(self, plan: StepPlan) -> DecodeRows:
        tables, count = self.tables, len(plan.rows)
        slots = np.fromiter([row.slot for row in plan.rows], np.int64, count)
        starts = np.fromiter([row.start for row in plan.rows], np.int64, count)
        ids = np.full(count, -1, dtype=np.int64)
        if any(row.tokens is not None for row in plan.rows):
            counts = np.fromiter([row.count for row in plan.rows], np.int64, count)
            ids = np.concatenate([row.tokens or [-1] for row in plan.rows]).astype(np.int64)
            within = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
            slots, starts = np.repeat(slots, counts), np.repeat(starts, counts) + within
        for row in np.flatnonzero((starts < tables.known[slots]) & (ids < 0)):
            ids[row] = tables.tokens[slots[row]][starts[row]]
        blocks = tables.block_tables[slots, starts // self.block_size]
        return DecodeRows(slots, starts, ids, self.sampler.state.flags[slots] & RANDOM, blocks)

    def _grows_by_itself(self, plan: StepPlan, rows: DecodeRows) -> bool:
        """Whether each block appended is the one that its slot's row in this step writes to."""
        if any(len(blocks) != 1 for _, blocks in plan.grown):
            return False
        columns = np.full(len(self.tables.known), -1, dtype=np.int64)
        columns[rows.slots] = rows.starts // self.block_size
        grown = np.array([slot for slot, _ in plan.grown])
        return bool((columns[grown] == self.tables.num_blocks[grown] - 1).all())
