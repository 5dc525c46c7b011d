"""Step plans to sampled tokens: the only room that holds both tensors and the scheduler's contract.

    slots.py         the persistent tables of running sequences: tokens, block tables, last sampled tokens
    inputs.py        StepPlan → StepInputs: everything the device needs for a step, in two uploads
    memory.py        how many KV blocks fit; what to say when none do
    prompt_logprobs.py  log-probabilities of prompt tokens, bounded in memory
    handle.py        a launched step and its result
    decode_buffers.py  static buffers of a decode step, filled by one kernel from one upload
    graphs.py        steps as CUDA graphs: decode
    prefill_graphs.py  steps of one chunk
    split.py    a step of both kinds as several graphs
    model_runner.py  ModelRunner: launch(plan) → handle
    parallel/        several ranks behind one runner
    assemble.py      a model, a backend and a cache to a runner and its graphs
    pool_size.py     the size of the KV pool, by running the largest step
    build.py         device, dtype and context length of an EngineConfig; the runner itself

Preparation (`InputBuilder.build`) and computation (`ModelRunner.compute`) are apart: the second touches
nothing but tensors, so that a decode step can be captured and replayed over static buffers.
"""

from __future__ import annotations

from leadline.engine.runner.build import build_runner
from leadline.engine.runner.model_runner import ModelRunner

__all__ = ["ModelRunner", "build_runner"]
