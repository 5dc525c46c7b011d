"""Log-probabilities of the model's own distribution: before penalties, bias, masks, temperature and
truncation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from leadline.engine.core.plan import SampledLogprobs

__all__ = ["LogprobRows", "gather_logprobs"]


@dataclass(slots=True)
class LogprobRows:
    """What N positions have to report, as tensors (on the device until `to_host`)."""

    token_ids: torch.Tensor
    """int64 [N]"""
    logprobs: torch.Tensor
    """float32 [N]"""
    ranks: torch.Tensor
    """int64 [N], 1 for the most likely token"""
    top_ids: torch.Tensor
    """int64 [N, K], most likely first"""
    top_logprobs: torch.Tensor
    """float32 [N, K]"""

    def to_host(self) -> LogprobRows:
        """Start copying to host memory; the caller waits for the stream before reading."""
        cuda = self.token_ids.is_cuda
        return LogprobRows(
            *(
                torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
                if cuda
                else tensor
                for tensor in (self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
            )
        )

    def entries(self, counts: list[int]) -> list[SampledLogprobs]:
        """The rows as Python values; row i lists its counts[i] most likely tokens."""
        tops = zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
        return [
            SampledLogprobs(token, logprob, rank, list(zip(ids[:count], values[:count], strict=True)))
            for token, logprob, rank, (ids, values), count in zip(
                self.token_ids.tolist(),
                self.logprobs.tolist(),
                self.ranks.tolist(),
                tops,
                counts,
                strict=True,
            )
        ]


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobRows:
    """Raw logits [N, V] (any float dtype) and the tokens int64 [N] that stand there → their
    log-probabilities."""
    logits = logits.float()
    normaliser = logits.logsumexp(dim=1)
    chosen = logits.gather(1, token_ids[:, None])
    ranks = (logits > chosen).sum(dim=1) + 1
    values, ids = torch.topk(logits, min(num_top, logits.shape[1]), dim=1)
    return LogprobRows(token_ids, chosen[:, 0] - normaliser, ranks, ids, values - normaliser[:, None])
