"""top-k, top-p and min-p, reduced to one number a row: the smallest logit that may still be drawn.

Working with a threshold rather than with a list of indices makes the result independent of how a sort
breaks ties (entries tied with the last one kept are all kept), and so of what else is in the batch.

    sorted logits   5.0  4.2  4.0  3.1 ...
    top-k = 3                 ^ threshold >= 4.0
    top-p                ^ threshold >= 4.2 when p <= P(5.0) + P(4.2), P renormalised over the top k
    min-p                threshold >= 5.0 + log(min_p)
"""

from __future__ import annotations

import torch

__all__ = ["threshold"]

_FIRST_TRY = 1024
"""Entries sorted first on CPU; a flatter distribution falls back to a full sort."""


def threshold(
    logits: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
    *,
    largest_k: int,
    every_row_has_k: bool,
    any_top_p: bool,
) -> torch.Tensor:
    """float32 [R, V] logits (temperature applied) → float32 [R, 1].

    top_k int64 [R] (0 is off), top_p float32 [R] (1 is off), log_min_p float32 [R] (-inf is off). The last
    three are what the host knows of those columns; they choose the cheapest sort that still decides every
    row.
    """
    vocab = logits.shape[1]
    top = logits.amax(dim=1, keepdim=True)
    low = top + log_min_p[:, None]
    if largest_k == 0 and not any_top_p:
        return low
    if every_row_has_k or not any_top_p:
        width = min(largest_k, vocab)
    elif logits.device.type == "cpu":
        width = min(max(largest_k, _FIRST_TRY), vocab)
    else:
        width = vocab
    values = _descending(logits, width)
    k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)[:, None]
    if not any_top_p:
        kth = values.gather(1, (k - 1).clamp(max=width - 1))
        return torch.maximum(low, torch.where(top_k[:, None] > 0, kth, -torch.inf))

    # A row without top-k renormalises over the whole vocabulary, one with it over its k best.
    rank = torch.arange(width, device=logits.device)
    inside = rank < k
    weights = torch.where(inside, torch.exp(values - top), 0.0)
    total = torch.where(
        top_k > 0, weights.sum(dim=1), torch.exp(logits - top).sum(dim=1) if not every_row_has_k else 1.0
    )[:, None]
    mass_before = weights.cumsum(dim=1) - weights
    kept = inside & (mass_before < top_p[:, None] * total)
    kept[:, 0] = True
    kept |= inside & (top_p[:, None] >= 1.0)
    count = kept.sum(dim=1, keepdim=True)
    undecided = (count == width) & (k > width) & (top_p < 1.0)[:, None]
    if width < vocab and not every_row_has_k and bool(undecided.any()):
        # The first entries do not reach some row's p (CPU only: looking costs no synchronisation there).
        return threshold(
            logits,
            torch.where(top_k > 0, top_k, vocab),
            top_p,
            log_min_p,
            largest_k=vocab,
            every_row_has_k=True,
            any_top_p=True,
        )
    off = ((top_p >= 1.0) & (top_k == 0))[:, None]
    return torch.maximum(low, torch.where(off, -torch.inf, values.gather(1, count - 1)))


def _descending(logits: torch.Tensor, width: int) -> torch.Tensor:
    if width < logits.shape[1]:
        return torch.topk(logits, width, dim=1, sorted=True).values
    return torch.sort(logits, dim=1, descending=True).values
