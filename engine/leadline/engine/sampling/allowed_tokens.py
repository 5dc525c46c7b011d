"""The only tokens that a sequence may have (`allowed_token_ids`): a row of the vocabulary for each slot that
asks."""

from __future__ import annotations

import numpy as np
import torch

from leadline.engine.core.plan import NewSeq
from leadline.engine.sampling.slot_rows import SlotRows, upload

__all__ = ["AllowedTokens"]


class AllowedTokens:
    """Allowed tokens by slot."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.rows = SlotRows(max_slots)
        self._allowed = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def enter(self, seq: NewSeq) -> None:
        """Give the slot a row that holds the sequence's allowed tokens."""
        row = self.rows.take(seq.slot)
        if missing := self.rows.size - self._allowed.shape[0]:
            self._allowed = torch.nn.functional.pad(self._allowed, (0, 0, 0, missing))
        tokens = upload(np.array(seq.sampling.allowed_token_ids, dtype=np.int64), self.device)
        self._allowed[row].zero_()
        self._allowed[row].index_fill_(0, tokens, True)  # an assignment would wait

    def apply(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Forbid, in float32 [N, V] logits with rows int64 [N], what is not allowed."""
        return logits.masked_fill(~self._allowed[rows], -torch.inf)
