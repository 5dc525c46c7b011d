"""Named ranges around the phases of a step, for profilers.

    step   | schedule | prepare | forward | sample |  ...  | wait | postprocess |
                      |<------- launch ----------->|

A step that runs as a CUDA graph is one `forward`: its inputs and its sampling are in the graph.

A phase without a sink costs one call and one comparison (0.1 us), so the hooks are always in place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

__all__ = ["PHASES", "PhaseClock", "Phases", "Sink", "nvtx_sink", "profiler_sink"]

PHASES = ("schedule", "prepare", "forward", "sample", "wait", "postprocess")
"""schedule: plan the step. prepare: tables and inputs. forward: the model, or a graph. sample: tokens from
logits. wait: until a step's tokens are on the host. postprocess: the scheduler's state, stop conditions,
outputs."""

Sink = Callable[[str], AbstractContextManager[object]]

_NOTHING = nullcontext()


class Phases:
    """`with phases("schedule"): ...`. One instance an engine core, shared by its runner."""

    __slots__ = ("sink",)

    def __init__(self, sink: Sink | None = None) -> None:
        self.sink = sink
        """Called with a phase's name, it makes what is entered around that phase."""

    def __call__(self, name: str) -> AbstractContextManager[object]:
        return _NOTHING if self.sink is None else self.sink(name)


def nvtx_sink() -> Sink | None:
    """Ranges that Nsight Systems shows, prefixed `leadline.`; None where torch has no CUDA to mark them
    with."""
    import torch

    if not torch.cuda.is_available():
        return None
    nvtx = torch.cuda.nvtx
    return lambda name: nvtx.range(f"leadline.{name}")


def profiler_sink() -> Sink:
    """Ranges that torch's profiler records beside the operations."""
    import torch

    return lambda name: torch.profiler.record_function(f"leadline.{name}")


class PhaseClock:
    """A sink that adds up host seconds by phase. Ranges may be nested; each counts in full."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def __call__(self, name: str) -> _Timed:
        return _Timed(self, name)

    def reset(self) -> None:
        self.seconds.clear()
        self.counts.clear()


class _Timed:
    __slots__ = ("_began", "_clock", "_name")

    def __init__(self, clock: PhaseClock, name: str) -> None:
        self._clock = clock
        self._name = name
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._began
        clock = self._clock
        clock.seconds[self._name] = clock.seconds.get(self._name, 0.0) + seconds
        clock.counts[self._name] = clock.counts.get(self._name, 0) + 1
