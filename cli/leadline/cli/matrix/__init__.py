"""`leadline bench matrix`: each technique of the engine alone, on and off, on one workload each.

    techniques.py  what is switched, by which settings, and why this machine cannot run it if it cannot
    workloads.py   token prompts that the techniques differ on
    measure.py     one run of a workload on one engine: TTFT, TPOT, throughput
    makeup.py      where the time of a request goes, by phase
    table.py       results as a table, a plot, and lines for results.jsonl
    budget.py      time, shared out among techniques
    command.py     options; the order of runs

Engines run in this process and are driven step by step, so that what is measured is the engine: no HTTP.
"""

from __future__ import annotations

from leadline.cli.matrix.command import add_arguments, run

__all__ = ["add_arguments", "run"]
