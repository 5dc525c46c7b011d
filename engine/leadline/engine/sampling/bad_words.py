"""Sequences of tokens that an output must not contain (`bad_words`): the last token of one is forbidden where
the output ends with the tokens before it.

    words, right-aligned     * *|5     any output: 5 is forbidden
                             * 7|8     behind 7: 8
                             3 7|9     behind 3 7: 9
    recent                   3 7       so 5, 8 and 9 are

The last tokens of each output stay on the device, so that the next step need not wait for the host. They are
read in the order of steps: sequences with words of several tokens do not draft (core/speculation.py).
"""

from __future__ import annotations

import numpy as np
import torch

from leadline.engine.core.plan import NewSeq
from leadline.engine.sampling.slot_rows import SlotRows, upload

__all__ = ["BadWords"]

_ANY, _NOTHING = -1, -2
"""In words: any token, or none, fits. In recent tokens: the output has not begun."""


class BadWords:
    """Words and recent output by slot.

    Attributes:
        remembers: bool [max_slots], on the host: some word of the slot has several tokens.
    """

    def __init__(self, max_slots: int, device: torch.device) -> None:
        self.device = device
        self.rows = SlotRows(max_slots)
        self.remembers = np.zeros(max_slots, dtype=bool)
        self._before = torch.zeros((0, 0, 0), dtype=torch.int64, device=device)
        """[rows, words, longest - 1]"""
        self._last = torch.zeros((0, 0), dtype=torch.int64, device=device)
        self._values = torch.zeros((0, 0), dtype=torch.float32, device=device)
        """-inf for a word, 0 for padding."""
        self._recent = torch.zeros((0, 0), dtype=torch.int64, device=device)
        """[rows, longest - 1]"""

    def enter(self, seq: NewSeq) -> None:
        """Give the slot a row that holds the sequence's words and its output so far."""
        words = seq.sampling.bad_words
        longest = max(map(len, words)) - 1
        row = self.rows.take(seq.slot)
        self.remembers[seq.slot] = longest > 0
        self._widen(len(words), longest)
        width = self._recent.shape[1]
        before = np.full((len(words), width), _ANY, dtype=np.int64)
        for line, word in zip(before, words, strict=True):
            line[width - len(word) + 1 :] = word[:-1]
        output = seq.token_ids[seq.prompt_len :][-width:] if width else []
        recent = np.full(width, _NOTHING, dtype=np.int64)
        recent[width - len(output) :] = output
        self._values[row].zero_()
        self._values[row, : len(words)].fill_(-torch.inf)
        self._before[row, : len(words)] = upload(before, self.device)
        self._last[row].zero_()
        self._last[row, : len(words)] = upload(np.array([word[-1] for word in words], np.int64), self.device)
        self._recent[row] = upload(recent, self.device)

    def _widen(self, words: int, longest: int) -> None:
        """Make the tables large enough. Words and recent tokens that are there stay right-aligned."""
        rows = self.rows.size - self._recent.shape[0]
        more = max(0, words - self._last.shape[1])
        wider = max(0, longest - self._recent.shape[1])
        if rows or more or wider:
            pad = torch.nn.functional.pad
            self._before = pad(self._before, (wider, 0, 0, more, 0, rows), value=_ANY)
            self._last = pad(self._last, (0, more, 0, rows))
            self._values = pad(self._values, (0, more, 0, rows))
            self._recent = pad(self._recent, (wider, 0, 0, rows), value=_NOTHING)

    def add(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Remember freshly sampled tokens. rows (distinct) and tokens are int64 [N]."""
        self._recent[rows] = torch.cat((self._recent[rows][:, 1:], tokens[:, None]), dim=1)

    def apply(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Forbid, in float32 [N, V] logits with rows int64 [N], the tokens that would end a word."""
        before = self._before[rows]
        fits = ((before == self._recent[rows][:, None]) | (before == _ANY)).all(dim=2)
        values = torch.where(fits, self._values[rows], 0.0)
        return logits.scatter_add(1, self._last[rows], values)
