"""Repetition, presence and frequency penalties, over token counts kept on the device.

A row of counts costs 5 bytes a vocabulary entry, so rows exist only for the slots that asked for a penalty.

    repetition (CTRL, Keskar et al. 2019): tokens of prompt or output: logit > 0 ? logit / r : logit * r
    frequency (OpenAI API): logit -= f * count in the output
    presence (OpenAI API): logit -= p * [count in the output > 0]
"""

from __future__ import annotations

import numpy as np
import torch

from leadline.engine.core.plan import NewSeq
from leadline.engine.sampling.slot_rows import SlotRows, upload

__all__ = ["TokenCounts"]


class TokenCounts:
    """Counts of output tokens and presence of prompt tokens, by slot."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.rows = SlotRows(max_slots)
        self.output = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def enter(self, seq: NewSeq) -> None:
        """Give the slot a row that holds the sequence's tokens so far."""
        row = self.rows.take(seq.slot)
        if missing := self.rows.size - self.output.shape[0]:
            self.output = torch.nn.functional.pad(self.output, (0, 0, 0, missing))
            self.in_prompt = torch.nn.functional.pad(self.in_prompt, (0, 0, 0, missing))
        tokens = upload(np.array(seq.token_ids, dtype=np.int64), self.device)
        self.in_prompt[row].zero_()
        self.in_prompt[row].index_fill_(0, tokens[: seq.prompt_len], True)  # an assignment would wait
        output = tokens[seq.prompt_len :]
        self.output[row].zero_()
        self.output[row].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def add(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count freshly sampled tokens. rows (count rows, distinct) and tokens are int64 [N]."""
        self.output[rows, tokens] += 1

    def apply(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        repetition: torch.Tensor,
        presence: torch.Tensor,
        frequency: torch.Tensor,
    ) -> torch.Tensor:
        """float32 [N, V] logits with count rows int64 [N] and penalties float32 [N] → penalised logits [N,
        V]."""
        counts = self.output[rows]
        in_output = counts > 0
        seen = in_output | self.in_prompt[rows]
        factor = repetition[:, None]
        penalised = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(seen, penalised, logits)
        logits = logits - frequency[:, None] * counts
        return logits - presence[:, None] * in_output
