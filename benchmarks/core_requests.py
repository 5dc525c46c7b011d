"""Requests for an engine core that runs in the benchmark's own process, without tokenizer or HTTP."""

from __future__ import annotations

import itertools
import time

from leadline.engine.core_process.engine_core import EngineCore
from leadline.engine.messages import CoreRequest
from leadline.engine.sampling_params import SamplingParams

__all__ = ["add_greedy"]

_ids = itertools.count()


def add_greedy(core: EngineCore, prompts: list[list[int]], new_tokens: int) -> dict[str, list[int]]:
    """Queue them; where the tokens of each will go, by request id, in the order of the prompts."""
    sampling = SamplingParams(temperature=0, max_tokens=new_tokens)
    tokens: dict[str, list[int]] = {}
    for prompt in prompts:
        name = str(next(_ids))
        tokens[name] = []
        core.add_request(
            CoreRequest(
                request_id=name, prompt_token_ids=prompt, sampling=sampling, seed=0, arrival=time.monotonic()
            )
        )
    return tokens
