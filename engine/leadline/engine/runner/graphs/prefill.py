"""Short prefills as CUDA graphs: a step that is one chunk of one sequence, padded to the next length up.

A lone prompt, or what is left of one after a prefix hit, is bound by the host's launches and not by the GPU
until it is some thousand tokens long. How long depends on the model, so it is measured: lengths are captured
up to the one at which the GPU takes longer than the host.

    host     | slot | start | count | random | sample slot | ids ... |     one upload
    device   tokens [0, count): positions start + i, slots by the block table; [count, length): padding
             cu_q = [0, count], context = start + count: attention stops there by itself

Padding tokens cost their share of the matrix products; they write no KV (slot -1), and nothing reads them.
"""

from __future__ import annotations

import bisect
import time

import numpy as np
import torch
import triton
import triton.language as tl

from leadline.engine.attention.interface import AttentionBatch
from leadline.engine.core.plan import StepPlan
from leadline.engine.models.base import KVWrite
from leadline.engine.runner.graphs.context import GraphContext
from leadline.engine.sampling.state import RANDOM

__all__ = ["PrefillGraphs", "prefill_lengths"]

_HEADER = 5
_TILE = 256
_FRESH_FROM = 512
"""Tokens; shorter chunks attend to so few keys that their way makes no difference."""


def prefill_lengths(limit: int) -> list[int]:
    """Multiples of 64 up to `limit`, ascending, at most a sixteenth apart from 1,024 on."""
    lengths, length = [], 64
    while length <= limit:
        lengths.append(length)
        length += max(64, length // 16 // 64 * 64)
    return lengths


@triton.jit
def _fill_kernel(
    packed, tables, ids, positions, slot_mapping, cu_q, context_lens, block_tables, last, sample_slot, random,
    next_position, length, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program i: tokens [i * TILE, (i + 1) * TILE) of `length`, and as many entries of the block table."""
    slot = tl.load(packed)
    begin = tl.load(packed + 1)
    count = tl.load(packed + 2)
    table = tables + tl.maximum(slot, 0) * WIDTH
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = token < count
    inside = token < length
    position = tl.where(live, begin + token, 0)
    block = tl.load(table + position // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    tl.store(ids + token, tl.load(packed + 5 + token, mask=live, other=0), mask=inside)
    tl.store(positions + token, position, mask=inside)
    where = tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(slot_mapping + token, where, mask=inside)
    used = (begin + count + BLOCK_SIZE - 1) // BLOCK_SIZE
    for start in range(tl.program_id(0) * TILE, used.to(tl.int32), tl.num_programs(0) * TILE):
        column = start + tl.arange(0, TILE)
        tl.store(block_tables + column, tl.load(table + column, mask=column < used), mask=column < used)
    if tl.program_id(0) == 0:
        tl.store(cu_q, 0)
        tl.store(cu_q + 1, count.to(tl.int32))
        tl.store(context_lens, (begin + count).to(tl.int32))
        tl.store(last, tl.maximum(count - 1, 0))
        tl.store(random, tl.load(packed + 3))
        tl.store(sample_slot, tl.load(packed + 4))
        tl.store(next_position, begin + count)


class PrefillGraphs:
    """Graphs of one chunk. Shares its context with the decode graphs."""

    def __init__(self, context: GraphContext, max_tokens: int) -> None:
        self.context = context
        self.lengths = prefill_lengths(max_tokens)
        """Lengths with a graph, once captured; candidates before."""
        device, most = context.tables.device, max(self.lengths, default=0)

        def wide(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int64, device=device)

        self.packed = wide(_HEADER + most)
        self.ids, self.positions, self.slot_mapping = wide(most), wide(most), wide(most)
        self.last, self.sample_slot, self.random, self.next_position = wide(1), wide(1), wide(1), wide(1)
        self.cu_q = torch.zeros(2, dtype=torch.int32, device=device)
        self.context_lens = torch.zeros(1, dtype=torch.int32, device=device)
        width = context.tables.device_tables.shape[1]
        self.block_tables = torch.zeros((1, width), dtype=torch.int32, device=device)
        self.launch_us = 0
        """What the host needed to launch the last plain step that was timed."""
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        """By length, and whether the chunk must start at position 0."""

    # -- capture ---------------------------------------------------------------------------------------------

    def settle_lengths(self) -> None:
        """Keep the lengths at which a plain step takes the host longer than the GPU."""
        while self.lengths and not self._host_bound(self.lengths[-1]):
            self.lengths = [length for length in self.lengths if length <= self.lengths[-1] * 0.7]

    def _host_bound(self, length: int) -> bool:
        self._send(np.zeros(_HEADER, dtype=np.int64))
        fresh = self.context.backend.graph_fresh_chunks
        self.step(length, fresh)  # compiles kernels
        torch.cuda.synchronize()
        self.context.least(0)  # the others may still compile
        began = time.perf_counter()
        self.step(length, fresh)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        self.launch_us = self.context.least(int((launched - began) * 1e6))
        return bool(self.context.least(time.perf_counter() - began < 1.2 * (launched - began)))

    def capture(self, length: int) -> None:
        """After any prefix; and without one, where the backend has a faster way for that."""
        self._send(np.zeros(_HEADER, dtype=np.int64))
        for fresh in (False, True) if self._two_ways(length) else (False,):
            self._graphs[length, fresh] = self.context.capture(lambda fresh=fresh: self.step(length, fresh))

    def costs(self) -> dict[int, int]:
        """Microseconds of a graph's replay by its length."""
        self._send(np.zeros(_HEADER, dtype=np.int64))
        return {length: self.context.microseconds(self._graphs[length, False]) for length in self.lengths}

    def clear(self) -> None:
        self._graphs.clear()

    def _two_ways(self, length: int) -> bool:
        return self.context.backend.graph_fresh_chunks and length >= _FRESH_FROM

    def step(self, length: int, fresh: bool) -> None:
        """What a graph holds. fresh: the chunk starts at position 0."""
        context = self.context
        model, tables = context.model, context.tables
        _fill_kernel[(triton.cdiv(length, _TILE),)](
            self.packed,
            tables.device_tables,
            self.ids,
            self.positions,
            self.slot_mapping,
            self.cu_q,
            self.context_lens,
            self.block_tables,
            self.last,
            self.sample_slot,
            self.random,
            self.next_position,
            length,
            WIDTH=tables.device_tables.shape[1],
            BLOCK_SIZE=context.block_size,
            TILE=_TILE,
            num_warps=4,
        )
        longest = length if fresh else context.max_model_len
        batch = AttentionBatch(
            num_rows=1,
            num_decodes=0,
            num_tokens=length,
            cu_q=self.cu_q,
            context_lens=self.context_lens,
            block_tables=self.block_tables,
            slot_mapping=self.slot_mapping[:length],
            query_lens_host=[length],
            context_lens_host=[longest],
            max_query_len=length,
            max_context_len=longest,
            kv_written=model.writes_kv,
            captured=True,
        )
        context.backend.begin(batch)
        hidden = model.forward(
            self.ids[:length],
            self.positions[:length],
            context.attend,
            KVWrite(context.kv_cache, batch.slot_mapping) if model.writes_kv else None,
            self.last,
        )
        logits = model.compute_logits(hidden, context.logits[:1])
        context.draw(logits, self.sample_slot, self.next_position, self.random)

    # -- replay ----------------------------------------------------------------------------------------------

    def fits(self, plan: StepPlan) -> bool:
        """Whether the step is one chunk that some graph is long enough for. Tokens of a chunk are known to
        the host: only rows of one token take theirs from the device."""
        if len(plan.rows) != 1 or not self._graphs:
            return False
        row = plan.rows[0]
        return 1 < row.count <= self.lengths[-1] and not row.prompt_logprobs and row.tokens is None

    def replay(self, plan: StepPlan) -> None:
        """Run a plan that `fits` and that the tables have applied. Results: as decode graphs leave them."""
        (row,) = plan.rows
        context = self.context
        random = int(context.sampler.state.flags[row.slot] & RANDOM) if row.sample else 0
        header = (row.slot, row.start, row.count, random, row.slot if row.sample else -1)
        ids = context.tables.tokens[row.slot][row.start : row.start + row.count]
        self._send(np.concatenate((np.array(header, dtype=np.int64), ids)))
        length = self.lengths[bisect.bisect_left(self.lengths, row.count)]
        self._graphs[length, row.start == 0 and self._two_ways(length)].replay()

    def _send(self, values: np.ndarray) -> None:
        host = torch.from_numpy(values).pin_memory()
        self.packed[: len(values)].copy_(host, non_blocking=True)
