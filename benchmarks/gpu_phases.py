"""Host time of a decode step by phase: where the loop's time goes while the GPU computes.

Wraps the loop's calls with a clock, so the sum is the real loop plus a microsecond a call. `wait` is the time
that the host had to spare: near zero means that the host, not the GPU, sets the pace.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from leadline.engine import LLM, SamplingParams

__all__ = ["phases", "timed_run"]


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.undo: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

        setattr(owner, attribute, timed)
        self.undo.append((owner, attribute, inner))

    def restore(self) -> None:
        for owner, attribute, inner in reversed(self.undo):
            setattr(owner, attribute, inner)


def phases(llm: LLM, rows: int, steps: int = 200) -> str:
    """One line: microseconds a step of each phase over `steps` decode steps of `rows` requests."""
    prompts = [[random.Random(i).randint(0, 10000) for _ in range(128)] for i in range(rows)]
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=steps)
    llm.generate(prompts, params, use_tqdm=False)  # prefixes are cached from here on
    return f"phases at {rows} rows" + timed_run(llm, prompts, [params] * rows)


def timed_run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> str:
    """Microseconds a step of each phase of one `generate`."""
    from leadline.engine.runner.model_runner import RunnerHandle

    core, clock = llm.core, _Clock()
    clock.wrap(core.scheduler, "schedule", "schedule")
    clock.wrap(core.runner, "launch", "launch")
    clock.wrap(core.scheduler, "update", "update")
    clock.wrap(llm._processor, "process", "process")
    clock.wrap(RunnerHandle, "wait", "wait")
    before = core.stats().steps_total
    began = time.perf_counter()
    try:
        llm.generate(prompts, params, use_tqdm=False)
    finally:
        clock.restore()
    total = time.perf_counter() - began
    count = core.stats().steps_total - before
    parts = ", ".join(f"{name} {seconds / count * 1e6:.0f}" for name, seconds in clock.seconds.items())
    rest = total - sum(clock.seconds.values())
    return (
        f", us a step over {count} steps: {parts}, rest {rest / count * 1e6:.0f}, "
        f"total {total / count * 1e6:.0f}"
    )
