"""Tensor parallelism: one runner made of several processes, each with a shard of the model.

    scheduler ─StepPlan─▶ ParallelRunner ─┬─ encode ─▶ plans in shared memory ─▶ worker 1: ModelRunner ┐
                          (rank 0)        │                                  └─▶ worker 2: ModelRunner ┤
                                          └─ ModelRunner, the leader's shard ◀── collectives ──────────┘

    codec.py      StepPlan ⇄ bytes: what a rank needs to know of a step, and nothing more
    ring.py       those bytes in shared memory, and a socket a rank to say that they are there
    messages.py   what leader and worker say to each other at the start and at the end
    ranks.py      the worker processes: start, watch, explain their death, stop
    leader.py     ParallelRunner, which the engine core sees as any other runner
    worker.py     a worker's main: `python -m leadline.engine.runner.parallel.worker`

No token crosses between ranks: every rank has all logits and draws the same tokens from them (the noise is a
function of seed and position). Rows stand in the plan's order on every rank, since every rank runs the same
plan. Nothing has a name another engine could use too: sockets, plans and the rendezvous are unnamed file
descriptors that workers inherit, so that nothing is left behind when all of them are killed.
"""

from __future__ import annotations

from leadline.engine.runner.parallel.leader import ParallelRunner, build_parallel_runner

__all__ = ["ParallelRunner", "build_parallel_runner"]
