"""Step plans to sampled tokens: the only package that holds both tensors and the scheduler's contract.

    slots.py         the persistent tables of running sequences: tokens, block tables, last sampled tokens
    inputs.py        StepPlan → StepInputs: everything the device needs for a step, in two uploads
    memory.py        how many KV blocks fit, by running the largest step; errors when none fit
    graphs/          steps as CUDA graphs
    split.py         a step of both kinds as several graphs
    model_runner.py  ModelRunner: launch(plan) → handle; log-probabilities of prompts
    collectives/     sums and gathers over ranks
    parallel/        several ranks behind one runner
    assemble.py      a model, a backend and a cache to a runner and its graphs
    shard.py         device, dtype and context length of an EngineConfig; the runner of one device
    build.py         the runner of one device or of several

Preparation (`InputBuilder.build`) and computation (`ModelRunner.compute`) are apart: the second touches
nothing but tensors, so that a decode step can be captured and replayed over static buffers.
"""

from __future__ import annotations

from leadline.engine.runner.build import build_runner
from leadline.engine.runner.model_runner import ModelRunner

__all__ = ["ModelRunner", "build_runner"]
