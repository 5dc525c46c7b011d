"""Static device buffers of a decode step, filled from one upload by one kernel, as a CUDA graph needs them.

The host sends five numbers a row; the kernel, the first node of every decode graph, makes the rest of them
where it is needed:

    slot, position, id, random, block  ──▶  input id      id, or last_token[slot] where id < 0
                                            context       position + 1
                                            slot mapping  block * block_size + position % block_size
                                            block table   a copy of device_tables[slot]
    and device_tables[slot, position // block_size] = block, which is how tables grow in decode steps.

Padding rows have slot -1: position 0, slot mapping -1 (nothing is written), a context that the backend names,
block 0. Table entries past a row's context keep older block ids: valid addresses that are never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from leadline.engine.attention.interface import AttentionBatch
from leadline.engine.runner.slots import SlotTables

__all__ = ["FIELDS", "DecodeBuffers", "DecodeRows"]

FIELDS = 5


@dataclass(slots=True)
class DecodeRows:
    """A step of one token a row, all of them sampled, as numpy int64 [R]."""

    slots: np.ndarray
    starts: np.ndarray
    """Position of each row's input token."""
    ids: np.ndarray
    """Known on the host, or -1: the slot's last token."""
    random: np.ndarray
    """0 where the row is greedy"""
    blocks: np.ndarray
    """Block that holds the input token's KV"""


@triton.jit(do_not_specialize=["rows_sent"])
def _fill_kernel(
    packed, last_token, tables, slots, random, ids, positions, next_positions, context_lens, slot_mapping,
    block_tables, rows_sent, WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PADDING: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program row. packed int64 [5, rows_sent]; tables int32 [slots, WIDTH]; block_tables likewise by row."""
    row = tl.program_id(0)
    slot = tl.load(packed + row)
    position = tl.load(packed + rows_sent + row)
    token = tl.load(packed + 2 * rows_sent + row)
    is_random = tl.load(packed + 3 * rows_sent + row)
    block = tl.load(packed + 4 * rows_sent + row)
    padding = slot < 0
    if token < 0:
        token = tl.load(last_token + tl.maximum(slot, 0))
    context = tl.where(padding, PADDING, position + 1)
    tl.store(slots + row, slot)
    tl.store(random + row, is_random)
    tl.store(ids + row, tl.where(padding, 0, token))
    tl.store(positions + row, position)
    tl.store(next_positions + row, position + 1)
    tl.store(context_lens + row, context.to(tl.int32))
    tl.store(slot_mapping + row, tl.where(padding, -1, block * BLOCK_SIZE + position % BLOCK_SIZE))
    used = (context + BLOCK_SIZE - 1) // BLOCK_SIZE
    column = position // BLOCK_SIZE
    lanes = tl.arange(0, TILE)
    source = tables + tl.maximum(slot, 0) * WIDTH
    target = block_tables + row.to(tl.int64) * WIDTH
    for start in range(0, used.to(tl.int32), TILE):
        columns = start + lanes
        entries = tl.load(source + columns, mask=columns < used, other=0)
        entries = tl.where(columns == column, block.to(tl.int32), entries)
        tl.store(target + columns, entries, mask=columns < used)
    if slot >= 0:
        tl.store(source + column, block.to(tl.int32))


class DecodeBuffers:
    """Buffers for up to max_rows rows; `fill(size)` launches the kernel over the first `size` of them."""

    def __init__(self, tables: SlotTables, max_rows: int, block_size: int, padding: int) -> None:
        device = tables.device
        self.tables, self.block_size, self.padding = tables, block_size, padding
        self.width = tables.device_tables.shape[1]

        def wide() -> torch.Tensor:
            return torch.zeros(max_rows, dtype=torch.int64, device=device)

        self.packed = torch.zeros(FIELDS * max_rows, dtype=torch.int64, device=device)
        self.slots, self.random, self.ids = wide(), wide(), wide()
        self.positions, self.next_positions, self.slot_mapping = wide(), wide(), wide()
        """What the step sampled; written by the graph's last kernel."""
        self.context_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((max_rows, self.width), dtype=torch.int32, device=device)
        self.cu_q = torch.arange(max_rows + 1, dtype=torch.int32, device=device)

    def send(self, rows: DecodeRows | None, size: int) -> None:
        """Start the upload of `rows` padded to `size`; None is a step of padding only."""
        host = torch.empty((FIELDS, size), dtype=torch.int64, pin_memory=True)
        array = host.numpy()
        count = 0
        if rows is not None:
            count = len(rows.slots)
            array[0, :count] = rows.slots
            array[1, :count] = rows.starts
            array[2, :count] = rows.ids
            array[3, :count] = rows.random
            array[4, :count] = rows.blocks
        array[:, count:] = 0
        array[0, count:] = -1
        self.packed[: FIELDS * size].copy_(host.view(-1), non_blocking=True)

    def fill(self, size: int) -> None:
        _fill_kernel[(size,)](
            self.packed,
            self.tables.last_token,
            self.tables.device_tables,
            self.slots,
            self.random,
            self.ids,
            self.positions,
            self.next_positions,
            self.context_lens,
            self.slot_mapping,
            self.block_tables,
            size,
            WIDTH=self.width,
            BLOCK_SIZE=self.block_size,
            PADDING=self.padding,
            TILE=min(1024, triton.next_power_of_2(self.width)),
            num_warps=1,
        )

    def batch(self, size: int, max_model_len: int, kv_written: bool) -> AttentionBatch:
        """What the attention backend sees of a step of `size` rows; host lists state the worst case."""
        return AttentionBatch(
            num_rows=size,
            num_decodes=size,
            num_tokens=size,
            cu_q=self.cu_q[: size + 1],
            context_lens=self.context_lens[:size],
            block_tables=self.block_tables[:size],
            slot_mapping=self.slot_mapping[:size],
            query_lens_host=[1] * size,
            context_lens_host=[max_model_len] * size,
            max_query_len=1,
            max_context_len=max_model_len,
            kv_written=kv_written,
        )
