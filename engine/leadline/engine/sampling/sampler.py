"""Logits to tokens, in the order that defines the result:

    raw logits ─┬─▶ log-probabilities (reported)
                └─▶ penalties ─▶ bias ─▶ bans before min_tokens, of words and of what is not allowed
                     ─▶ grammar mask ─▶ greedy: argmax
                                    └─▶ / temperature ─▶ top-k, top-p, min-p ─▶ + Gumbel noise ─▶ argmax

Work that no row of the batch needs is skipped, as host-side flags tell; nothing here waits for the
device. Equal logits go to the lowest token id.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from leadline.engine.core.plan import NewSeq
from leadline.engine.sampling.adjust import add_pairs_, apply_bitmasks_, ban_pairs_
from leadline.engine.sampling.allowed_tokens import AllowedTokens
from leadline.engine.sampling.bad_words import BadWords
from leadline.engine.sampling.logprobs import LogprobRows, gather_logprobs
from leadline.engine.sampling.noise import gumbel, row_keys
from leadline.engine.sampling.penalties import TokenCounts
from leadline.engine.sampling.slot_rows import upload
from leadline.engine.sampling.state import (
    ALLOWED,
    BANS,
    BIAS,
    LOGPROBS,
    PENALTY,
    RANDOM,
    TRUNCATE,
    WORDS,
    SamplingState,
)
from leadline.engine.sampling.truncate import threshold

__all__ = ["Sampler"]


class Sampler:
    """Owns the per-slot sampling state. One instance an engine; calls come in step order."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.state = SamplingState(max_slots, device)
        self.counts = TokenCounts(max_slots, vocab_size, device)
        self.allowed = AllowedTokens(max_slots, vocab_size, device)
        self.words = BadWords(max_slots, device)
        self._entries = torch.arange(vocab_size, dtype=torch.int32, device=device)

    def enter(self, seqs: list[NewSeq]) -> None:
        """Sequences take their slots."""
        self.state.enter(seqs)
        self.release([seq.slot for seq in seqs])
        for seq in seqs:
            flags = self.state.flags[seq.slot]
            if flags & PENALTY:
                self.counts.enter(seq)
            if flags & ALLOWED:
                self.allowed.enter(seq)
            if flags & WORDS:
                self.words.enter(seq)

    def release(self, slots: list[int]) -> None:
        """Sequences leave their slots."""
        for slot in slots:
            for table in (self.counts, self.allowed, self.words):
                table.rows.release(slot)

    def sample(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        slots_device: torch.Tensor,
        positions: torch.Tensor,
        masks: dict[int, Any],
    ) -> tuple[torch.Tensor, LogprobRows | None]:
        """Draw one token a row.

        logits [R, V] in the model's dtype; slots int64 [R] on host and device, distinct; positions int64 [R],
        where the drawn tokens will stand; masks by slot. Returns tokens int64 [R] and log-probabilities for
        the rows whose sequence asked (in row order), or None.
        """
        flags = self.state.flags[slots]
        some = int(np.bitwise_or.reduce(flags, initial=0))
        if not some and not masks:
            return logits.argmax(dim=1), None
        raw = logits
        if some & ~LOGPROBS or masks:
            logits = self._adjust(
                raw.to(torch.float32, copy=True), flags, slots, slots_device, positions, masks
            )
        tokens = logits.argmax(dim=1)
        if some & RANDOM:
            tokens = self._draw(logits, tokens, flags, slots, slots_device, positions)
        if some & PENALTY:
            rows = np.flatnonzero(flags & PENALTY)
            self.counts.add(self._upload(self.counts.rows.of_slot[slots[rows]]), tokens[self._upload(rows)])
        if some & WORDS:
            rows = np.flatnonzero((flags & WORDS).astype(bool) & self.words.remembers[slots])
            if len(rows):
                self.words.add(self._upload(self.words.rows.of_slot[slots[rows]]), tokens[self._upload(rows)])
        reported = None
        if some & LOGPROBS:
            rows = np.flatnonzero(flags & LOGPROBS)
            number = int(self.state.num_logprobs[slots[rows]].max())
            index = self._upload(rows)
            whole = len(rows) == len(slots)
            reported = gather_logprobs(raw if whole else raw[index], tokens[index], number)
        return tokens, reported

    def _adjust(
        self,
        logits: torch.Tensor,
        flags: np.ndarray,
        slots: np.ndarray,
        slots_device: torch.Tensor,
        positions: torch.Tensor,
        masks: dict[int, Any],
    ) -> torch.Tensor:
        """Penalties, bias, bans and masks on float32 logits that this call may overwrite."""
        state = self.state
        some = int(np.bitwise_or.reduce(flags, initial=0))
        if some & PENALTY:
            rows = np.flatnonzero(flags & PENALTY)
            index = self._upload(rows)
            where = slots_device[index]
            logits[index] = self.counts.apply(
                logits[index],
                self._upload(self.counts.rows.of_slot[slots[rows]]),
                state.repetition[where],
                state.presence[where],
                state.frequency[where],
            )
        if some & BIAS:
            index = self._upload(np.flatnonzero(flags & BIAS))
            where = slots_device[index]
            part = logits[index]
            add_pairs_(part, state.bias_ids[where], state.bias_values[where])
            logits[index] = part
        if some & BANS:
            index = self._upload(np.flatnonzero(flags & BANS))
            where = slots_device[index]
            part = logits[index]
            ban_pairs_(
                part,
                state.banned_ids[where],
                state.banned_values[where],
                positions[index],
                state.ban_before[where],
            )
            logits[index] = part
        if some & (ALLOWED | WORDS):
            self._forbid(logits, flags, slots, masks)
        if masks:
            masked = [(row, masks[slot]) for row, slot in enumerate(slots.tolist()) if slot in masks]
            if masked:
                apply_bitmasks_(logits, [row for row, _ in masked], [mask for _, mask in masked])
        return logits

    def _forbid(
        self, logits: torch.Tensor, flags: np.ndarray, slots: np.ndarray, masks: dict[int, Any]
    ) -> None:
        """Bans of single requests. A row that has a mask goes without: admission refuses grammars beside
        them, so the mask forces the end of a thought."""
        free = np.array([slot not in masks for slot in slots.tolist()])
        for flag, table in ((ALLOWED, self.allowed), (WORDS, self.words)):
            rows = np.flatnonzero((flags & flag).astype(bool) & free)
            if len(rows):
                index = self._upload(rows)
                logits[index] = table.apply(logits[index], self._upload(table.rows.of_slot[slots[rows]]))

    def _draw(
        self,
        logits: torch.Tensor,
        greedy_tokens: torch.Tensor,
        flags: np.ndarray,
        slots: np.ndarray,
        slots_device: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Replace the greedy tokens of the rows that sample by draws."""
        rows = np.flatnonzero(flags & RANDOM)
        index = None
        if len(rows) < len(slots):
            index = self._upload(rows)
            logits, slots_device, positions = logits[index], slots_device[index], positions[index]
        state = self.state
        # The largest logit becomes 0 first: a small temperature then cannot overflow.
        scaled = (logits - logits.amax(dim=1, keepdim=True)) / state.temperature[slots_device, None]
        scores = gumbel(row_keys(state.seed[slots_device], positions), self._entries).add_(scaled)
        if np.any(flags & TRUNCATE):
            host_slots = slots[rows]
            host_k = state.host_top_k[host_slots]
            lowest = threshold(
                scaled,
                state.top_k[slots_device],
                state.top_p[slots_device],
                state.log_min_p[slots_device],
                largest_k=int(host_k.max()),
                every_row_has_k=bool((host_k > 0).all()),
                any_top_p=bool((state.host_top_p[host_slots] < 1.0).any()),
            )
            scores.masked_fill_(scaled < lowest, -torch.inf)
        drawn = scores.argmax(dim=1)
        return drawn if index is None else greedy_tokens.index_copy(0, index, drawn)

    def _upload(self, rows: np.ndarray) -> torch.Tensor:
        return upload(rows.astype(np.int64, copy=False), self.device)
