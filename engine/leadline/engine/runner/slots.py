"""The persistent tables of running sequences, one row a slot: block tables, known tokens, last sampled token.

    block_tables  host int32 [slots, blocks]   mirrored on the device, where steps gather the rows they need
    tokens        host, one int32 array a slot: the tokens given in NewSeq
    last_token    device int64 [slots]         written by sampling, read by the next step; never crosses the
    host

On CPU host and device tables are the same memory.
"""

from __future__ import annotations

import numpy as np
import torch

from leadline.engine.core.plan import NewSeq, StepPlan
from leadline.engine.sampling.slot_rows import upload

__all__ = ["SlotTables"]

_NO_TOKENS = np.zeros(0, dtype=np.int32)


class SlotTables:
    """Rows are written when sequences enter and grow; a released row is overwritten by its next owner."""

    def __init__(self, max_slots: int, max_blocks: int, device: torch.device) -> None:
        self.device = device
        self.block_tables = np.zeros((max_slots, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(max_slots, dtype=np.int64)
        self.tokens: list[np.ndarray] = [_NO_TOKENS] * max_slots
        self.known = np.zeros(max_slots, dtype=np.int64)
        """Tokens given at entry: positions at or beyond it take `last_token`."""
        self.prompt_len = np.zeros(max_slots, dtype=np.int64)
        self.last_token = torch.zeros(max_slots, dtype=torch.int64, device=device)
        if device.type == "cpu":
            self.device_tables = torch.from_numpy(self.block_tables)
        else:
            self.device_tables = torch.zeros((max_slots, max_blocks), dtype=torch.int32, device=device)

    def apply(self, plan: StepPlan, *, grow_device: bool = True) -> None:
        """Sequences that enter, then blocks appended. One small upload each on a GPU.

        grow_device: False if the caller brings the blocks appended to the device's table in another way.
        """
        if plan.entered:
            for seq in plan.entered:
                self._enter(seq)
            if self.device.type != "cpu":
                slots = np.array([seq.slot for seq in plan.entered], dtype=np.int64)
                width = int(self.num_blocks[slots].max())
                rows = upload(self.block_tables[slots, :width], self.device)
                self.device_tables[:, :width].index_copy_(0, upload(slots, self.device), rows)
        if plan.grown:
            self._grow(plan.grown)
            if grow_device:
                self.grow_device(plan.grown)

    def _enter(self, seq: NewSeq) -> None:
        slot, count = seq.slot, len(seq.block_ids)
        self.block_tables[slot, :count] = seq.block_ids
        self.num_blocks[slot] = count
        self.tokens[slot] = np.array(seq.token_ids, dtype=np.int32)
        self.known[slot] = len(seq.token_ids)
        self.prompt_len[slot] = seq.prompt_len

    def _grow(self, grown: list[tuple[int, list[int]]]) -> None:
        for slot, blocks in grown:
            first = int(self.num_blocks[slot])
            self.block_tables[slot, first : first + len(blocks)] = blocks
            self.num_blocks[slot] = first + len(blocks)

    def grow_device(self, grown: list[tuple[int, list[int]]]) -> None:
        """Bring blocks that the host's table ends with to the device's."""
        if self.device.type == "cpu":
            return
        triples: list[tuple[int, int, int]] = []
        for slot, blocks in grown:
            first = int(self.num_blocks[slot]) - len(blocks)
            triples.extend((slot, first + i, block) for i, block in enumerate(blocks))
        packed = upload(np.array(triples, dtype=np.int64).T, self.device)
        self.device_tables[packed[0], packed[1]] = packed[2].to(torch.int32)
