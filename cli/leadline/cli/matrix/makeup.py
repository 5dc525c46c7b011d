"""Where the time of a request goes.

On CPU each operation ends before the next begins: a clock around the phases (engine/profiling) and around
attention says it all. On a GPU the host runs ahead, so the time of a step is split by what the GPU did, from
torch's profiler; what is left is time in which the GPU waited for the host, and that is shared out by what
the host spent:

    wall of the run   | attention | other GPU | sample | data movement |   GPU idle    |
                                                                       `- schedule : prepare : detokenize ...
                                                                          in the host's own proportions

A request's life = tokenize + queue + the steps from its admission to its last token, those of others that it
shared steps with included: that is what its user waits for.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leadline.cli.matrix.measure import Life, Run, run_work
from leadline.cli.matrix.workloads import Work

if TYPE_CHECKING:
    from leadline.engine import LLM

__all__ = ["PARTS", "Makeup", "make_up"]

PARTS = (
    "tokenize",
    "queue",
    "schedule",
    "data movement",
    "attention",
    "other GPU",
    "sample",
    "detokenize",
    "other host",
)
"""`other GPU`: the rest of the model; on a CPU engine that is where it runs."""

_PART_OF_PHASE = {
    "schedule": "schedule",
    "prepare": "data movement",
    "attention": "attention",
    "forward": "other GPU",
    "sample": "sample",
    "wait": "data movement",
    "postprocess": "schedule",
    "detokenize": "detokenize",
    "tokenize": "tokenize",
}
_KERNELS = (
    (
        "attention",
        (
            *("decode_kernel", "decode_items_kernel", "prefill_kernel", "prefill_items_kernel"),
            *("flash", "fmha", "attention", "sdpa"),
        ),
    ),
    ("sample", ("scan_kernel", "draw_kernel", "argmax", "topk", "sort")),
    ("data movement", ("memcpy", "memset", "_fill_kernel", "_write_kernel", "index_copy")),
)
"""Part → what the names of its kernels hold; the sums that cuBLAS makes of partial products
(splitKreduce_kernel) are the model's."""


@dataclass(slots=True, frozen=True)
class Makeup:
    """Mean over requests, in seconds by part; they add up to the mean latency."""

    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def make_up(llm: LLM, work: Work, profiled: Work) -> Makeup:
    """Run `work` once and take its requests' time apart. `profiled`: other work of the same kind, which on a
    GPU runs under the profiler: that slows the host down, so only the kernels' times are taken from it."""
    from leadline.engine.profiling import PhaseClock

    clock = PhaseClock()
    core = llm.core
    runner: Any = getattr(core.runner, "runner", core.runner)
    core.phases.sink = clock
    try:
        if runner.device.type == "cuda":
            run = run_work(llm, work, clock.seconds)
            core.phases.sink = None
            return _mean(run, _split_by_gpu(run, _kernel_seconds(lambda: run_work(llm, profiled))))
        attend = runner.attend

        def timed(*args: Any) -> Any:
            with clock("attention"):
                return attend(*args)

        runner.attend = timed
        try:
            run = run_work(llm, work, clock.seconds)
        finally:
            del runner.attend  # the class's own again
        return _mean(run, _split_by_clock)
    finally:
        core.phases.sink = None


Split = Callable[[float, dict[str, float]], dict[str, float]]
"""(seconds of wall time, host seconds by phase in them) → seconds by part, which add up to the former."""


def _split_by_clock(wall: float, host: dict[str, float]) -> dict[str, float]:
    host = dict(host)
    host["forward"] = host.get("forward", 0.0) - host.get("attention", 0.0)
    parts = dict.fromkeys(PARTS, 0.0)
    for phase, seconds in host.items():
        parts[_PART_OF_PHASE[phase]] += seconds
    parts["other host"] = max(0.0, wall - sum(parts.values()))
    return parts


def _split_by_gpu(run: Run, kernels: dict[str, float]) -> Split:
    """`kernels`: GPU seconds of the whole run by part, shared out evenly over its time after tokenizing."""
    tokenizing = run.steps[-1][1].get("tokenize", 0.0)
    used = sum(kernels.values())
    busy = min(1.0, used / (run.seconds - tokenizing))

    def split(wall: float, host: dict[str, float]) -> dict[str, float]:
        parts = dict.fromkeys(PARTS, 0.0)
        for part, seconds in kernels.items():
            parts[part] += wall * busy * seconds / used
        # In `wait` the host is idle itself: it has no part in the GPU's idle time.
        spent = {phase: seconds for phase, seconds in host.items() if phase != "wait"}
        awake = max(wall - host.get("wait", 0.0), sum(spent.values()))
        named = {"forward": "other host", "prepare": "data movement"}
        for phase, seconds in spent.items():
            parts[named.get(phase, _PART_OF_PHASE[phase])] += wall * (1 - busy) * seconds / awake
        parts["other host"] += wall - sum(parts.values())
        return parts

    return split


def _mean(run: Run, split: Split) -> Makeup:
    times = [at for at, _ in run.steps]
    total = dict.fromkeys(PARTS, 0.0)
    for life in run.lives:
        for part, seconds in _of_life(life, run, times, split).items():
            total[part] += seconds
    return Makeup({part: seconds / len(run.lives) for part, seconds in total.items()})


def _of_life(life: Life, run: Run, times: list[float], split: Split) -> dict[str, float]:
    first = bisect.bisect_right(times, life.admitted)
    last = min(bisect.bisect_left(times, life.ended), len(times) - 1)
    before = run.steps[first - 1] if first else (life.admitted, {})
    after = run.steps[last]
    host = {phase: seconds - before[1].get(phase, 0.0) for phase, seconds in after[1].items()}
    host.pop("tokenize", None)
    parts = split(max(0.0, life.ended - life.admitted), host)
    # Others' tokenizing before it, where all came at once, is its own waiting too.
    parts["tokenize"] += life.submitted - life.began
    parts["queue"] += life.admitted - life.submitted
    return parts


def _kernel_seconds(work: Callable[[], object]) -> dict[str, float]:
    """GPU seconds by part. Raises RuntimeError where the profiler sees nothing."""
    import torch

    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    seconds: dict[str, float] = {}
    for event in profiler.key_averages():
        spent = getattr(event, "self_device_time_total", 0.0) * 1e-6
        if spent > 0:
            part = part_of_kernel(event.key)
            seconds[part] = seconds.get(part, 0.0) + spent
    if not seconds:
        raise RuntimeError("the profiler saw no GPU kernel")
    return seconds


def part_of_kernel(name: str) -> str:
    """Which part a GPU kernel's time belongs to, by its name."""
    lowered = name.lower()
    for part, marks in _KERNELS:
        if any(mark in lowered for mark in marks):
            return part
    return "other GPU"
