"""Adjustments that only add to logits or forbid ids: logit_bias, min_tokens, grammar bitmasks.

All act in place on float32 logits. Pairs come from padded per-slot tables, so rows of different lengths
need no loop: a padding pair adds 0 to entry 0.
"""

from __future__ import annotations

import numpy as np
import torch

from leadline.engine.sampling.slot_rows import upload

__all__ = ["add_pairs_", "apply_bitmasks_", "ban_pairs_"]


def add_pairs_(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    """logits [R, V] += values [R, K] at ids int64 [R, K]."""
    logits.scatter_add_(1, ids, values)


def ban_pairs_(
    logits: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    ban_before: torch.Tensor,
) -> None:
    """Forbid ids (value -inf) in rows whose next token stands at a position below ban_before. Both int64
    [R]."""
    active = (positions < ban_before)[:, None]
    logits.scatter_add_(1, ids, torch.where(active, values, 0.0))


def apply_bitmasks_(logits: torch.Tensor, rows: list[int], masks: list[np.ndarray]) -> None:
    """Forbid, in the given rows, every entry whose bit is clear.

    A mask is int32 [W]; bit b of word w allows entry 32 * w + b. Entries past the mask's end are forbidden.
    """
    vocab = logits.shape[1]
    words = upload(np.stack(masks), logits.device)
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
    allowed = bits.reshape(len(rows), -1)[:, :vocab].to(torch.bool)
    if allowed.shape[1] < vocab:
        allowed = torch.nn.functional.pad(allowed, (0, vocab - allowed.shape[1]))
    index = upload(np.array(rows, dtype=np.int64), logits.device)
    logits[index] = logits[index].masked_fill(~allowed, -torch.inf)
