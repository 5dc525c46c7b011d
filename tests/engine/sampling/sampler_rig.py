"""A sampler with sequences in slots, and a plain numpy statement of what sampling should compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from leadline.engine.core.plan import NewSeq
from leadline.engine.sampling import LogprobRows, Sampler
from leadline.engine.sampling_params import SamplingParams

CPU = torch.device("cpu")


class Rig:
    """Sequence i sits in slot `slots[i]`; `draw` samples one token for each."""

    def __init__(
        self,
        params: list[SamplingParams],
        vocab: int,
        *,
        seeds: list[int] | None = None,
        tokens: list[list[int]] | None = None,
        prompt_lens: list[int] | None = None,
        banned: tuple[int, ...] = (),
        slots: list[int] | None = None,
    ) -> None:
        n = len(params)
        tokens = tokens or [[1, 2, 3]] * n
        self.slots = np.array(slots or list(range(n)), dtype=np.int64)
        self.lengths = [len(row) for row in tokens]
        self.sampler = Sampler(max(int(self.slots.max()) + 1, n), vocab, CPU)
        self.sampler.enter(
            [
                NewSeq(
                    slot=int(self.slots[i]),
                    seq_id=i,
                    token_ids=tokens[i],
                    prompt_len=prompt_lens[i] if prompt_lens else len(tokens[i]),
                    sampling=params[i],
                    seed=seeds[i] if seeds else i,
                    block_ids=[],
                    banned_until_min=banned,
                )
                for i in range(n)
            ]
        )

    def draw(
        self, logits: torch.Tensor, step: int = 0, masks: dict[int, Any] | None = None
    ) -> tuple[list[int], LogprobRows | None]:
        positions = torch.tensor(self.lengths) + step
        tokens, logprobs = self.sampler.sample(
            logits, self.slots, torch.from_numpy(self.slots), positions, masks or {}
        )
        return tokens.tolist(), logprobs


def reference_distribution(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]
) -> np.ndarray:
    """float64 probabilities [V] after penalties, bias, temperature, top-k, top-p and min-p, one entry at a
    time."""
    x = logits.astype(np.float64).copy()
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    x /= params.temperature
    order = sorted(range(len(x)), key=lambda token: -x[token])
    weights = np.exp(x - x.max())
    if params.top_k:
        order = order[: params.top_k]
    total, mass, kept = sum(weights[token] for token in order), 0.0, []
    for token in order:
        if params.top_p < 1.0 and mass >= params.top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    kept = [token for token in kept if weights[token] >= params.min_p * weights.max()]
    result = np.zeros(len(x))
    result[kept] = weights[kept] / weights[kept].sum()
    return result
