"""Sampling parameters of the running sequences, one row a slot, on the device.

A row is written when its sequence enters and read by every later step through one gather, so that a decode
step does no work per row in Python. `flags` mirrors on the host which features a slot uses; a step ORs the
flags of its rows and skips what none of them needs.
"""

from __future__ import annotations

import numpy as np
import torch

from leadline.engine.core.plan import NewSeq
from leadline.engine.sampling.slot_rows import upload

__all__ = ["ALLOWED", "BANS", "BIAS", "LOGPROBS", "PENALTY", "RANDOM", "TRUNCATE", "WORDS", "SamplingState"]

RANDOM = 1
"""Not greedy."""
TRUNCATE = 2
"""top-k, top-p or min-p is on."""
PENALTY = 4
BIAS = 8
BANS = 16
"""Some ids are banned until min_tokens is reached."""
LOGPROBS = 32
ALLOWED = 64
"""Only some ids are allowed."""
WORDS = 128
"""Some sequences of ids are banned."""


class SamplingState:
    """Per-slot tensors; see the attributes. `slots` are row numbers in [0, max_slots)."""

    def __init__(self, max_slots: int, device: torch.device) -> None:
        self.device = device
        self.max_slots = max_slots

        def column(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((max_slots,), value, dtype=dtype, device=device)

        self.temperature = column(1.0, torch.float32)
        self.top_k = column(0, torch.int64)
        self.top_p = column(1.0, torch.float32)
        self.log_min_p = column(-torch.inf, torch.float32)
        self.repetition = column(1.0, torch.float32)
        self.presence = column(0.0, torch.float32)
        self.frequency = column(0.0, torch.float32)
        self.seed = column(0, torch.int64)
        self.ban_before = column(0, torch.int64)
        """Banned ids apply to tokens at positions below this one."""
        self.bias_ids = torch.zeros((max_slots, 0), dtype=torch.int64, device=device)
        self.bias_values = torch.zeros((max_slots, 0), dtype=torch.float32, device=device)
        self.banned_ids = torch.zeros((max_slots, 0), dtype=torch.int64, device=device)
        self.banned_values = torch.zeros((max_slots, 0), dtype=torch.float32, device=device)
        """-inf for a banned id, 0 for padding."""

        self.flags = np.zeros(max_slots, dtype=np.uint8)
        self.host_top_k = np.zeros(max_slots, dtype=np.int64)
        self.host_top_p = np.ones(max_slots, dtype=np.float32)
        self.num_logprobs = np.zeros(max_slots, dtype=np.int64)
        self.num_prompt_logprobs = np.zeros(max_slots, dtype=np.int64)

    def enter(self, seqs: list[NewSeq]) -> None:
        """Write the rows of sequences that take a slot."""
        if not seqs:
            return
        floats = np.empty((6, len(seqs)), dtype=np.float32)
        ints = np.empty((4, len(seqs)), dtype=np.int64)
        for column, seq in enumerate(seqs):
            params = seq.sampling
            greedy = params.greedy
            with np.errstate(divide="ignore"):
                log_min_p = np.log(np.float32(params.min_p))
            floats[:, column] = (
                1.0 if greedy else params.temperature,
                params.top_p,
                log_min_p,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            )
            ban_before = seq.prompt_len + params.min_tokens if seq.banned_until_min else 0
            ints[:, column] = (seq.slot, params.top_k, seq.seed, ban_before)
            self._set_host(seq, greedy)
        index, top_k, seed, ban_before_all = upload(ints, self.device)
        values = upload(floats, self.device)
        for target, source in (
            (self.temperature, values[0]),
            (self.top_p, values[1]),
            (self.log_min_p, values[2]),
            (self.repetition, values[3]),
            (self.presence, values[4]),
            (self.frequency, values[5]),
            (self.top_k, top_k),
            (self.seed, seed),
            (self.ban_before, ban_before_all),
        ):
            target[index] = source
        for seq in seqs:
            if seq.sampling.logit_bias:
                self._set_bias(seq.slot, seq.sampling.logit_bias)
            if self.flags[seq.slot] & BANS:
                self._set_banned(seq.slot, seq.banned_until_min)

    def _set_host(self, seq: NewSeq, greedy: bool) -> None:
        params, slot = seq.sampling, seq.slot
        flags = 0
        if not greedy:
            flags |= RANDOM
            if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0:
                flags |= TRUNCATE
        if (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        ):
            flags |= PENALTY
        if params.logit_bias:
            flags |= BIAS
        if params.min_tokens > 0 and seq.banned_until_min:
            flags |= BANS
        if params.logprobs is not None:
            flags |= LOGPROBS
        if params.allowed_token_ids is not None:
            flags |= ALLOWED
        if params.bad_words:
            flags |= WORDS
        self.flags[slot] = flags
        self.host_top_k[slot] = params.top_k
        self.host_top_p[slot] = params.top_p
        self.num_logprobs[slot] = params.logprobs or 0
        self.num_prompt_logprobs[slot] = params.prompt_logprobs or 0

    def _widen(self, name: str, width: int) -> None:
        ids, values = getattr(self, f"{name}_ids"), getattr(self, f"{name}_values")
        missing = width - ids.shape[1]
        if missing > 0:
            setattr(self, f"{name}_ids", torch.nn.functional.pad(ids, (0, missing)))
            setattr(self, f"{name}_values", torch.nn.functional.pad(values, (0, missing)))

    def _set_bias(self, slot: int, bias: dict[int, float]) -> None:
        self._widen("bias", len(bias))
        self._write_pairs("bias", slot, list(bias.keys()), list(bias.values()))

    def _set_banned(self, slot: int, ids: tuple[int, ...]) -> None:
        self._widen("banned", len(ids))
        self._write_pairs("banned", slot, list(ids), [-np.inf] * len(ids))

    def _write_pairs(self, name: str, slot: int, ids: list[int], values: list[float]) -> None:
        id_row, value_row = getattr(self, f"{name}_ids")[slot], getattr(self, f"{name}_values")[slot]
        id_row.zero_()
        value_row.zero_()
        id_row[: len(ids)] = upload(np.array(ids, dtype=np.int64), self.device)
        value_row[: len(values)] = upload(np.array(values, dtype=np.float32), self.device)
