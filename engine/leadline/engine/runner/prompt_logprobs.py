"""Log-probabilities of prompt tokens: the query at position p reports on the prompt token at p + 1.

Logits of a whole chunk would be [tokens, vocab] floats, gigabytes for a long chunk and a large vocabulary;
they are computed a slice at a time instead, so memory stays within what the profile run saw.
"""

from __future__ import annotations

import numpy as np
import torch

from leadline.engine.core.plan import StepPlan
from leadline.engine.models.base import CausalLM
from leadline.engine.runner.handle import PromptLogprobsPart
from leadline.engine.runner.inputs import StepInputs
from leadline.engine.runner.slots import SlotTables
from leadline.engine.sampling import gather_logprobs
from leadline.engine.sampling.transfer import upload

__all__ = ["prompt_logprobs"]


def prompt_logprobs(
    plan: StepPlan,
    inputs: StepInputs,
    hidden: torch.Tensor,
    model: CausalLM,
    tables: SlotTables,
    num_top: np.ndarray,
    rows_at_once: int,
) -> list[PromptLogprobsPart]:
    """Parts in prompt order for each row that asks. hidden [T, hidden size]; num_top by slot."""
    parts = []
    for index, row in enumerate(plan.rows):
        if not row.prompt_logprobs:
            continue
        first = int(inputs.host_cu_q[index])
        count = min(row.count, int(tables.prompt_len[row.slot]) - 1 - row.start)
        targets = tables.tokens[row.slot][row.start + 1 : row.start + 1 + max(count, 0)].astype(np.int64)
        top = int(num_top[row.slot])
        for begin in range(0, len(targets), rows_at_once):
            wanted = upload(targets[begin : begin + rows_at_once], hidden.device)
            logits = model.compute_logits(hidden[first + begin : first + begin + len(wanted)])
            rows = gather_logprobs(logits, wanted, top).to_host()
            parts.append(PromptLogprobsPart(row.slot, rows, top))
    return parts
