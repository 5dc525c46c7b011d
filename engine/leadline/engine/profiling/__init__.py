"""Looking at where an engine's time goes: ranges per phase of a step, and traces of some steps.

    phases.py   named ranges around the phases of a step; off unless they have a sink
    trace.py    torch profiler traces of a running core, written to one configured directory
    trace_requests.py   the core's orders for traces, one at a time

docs/profiling.md says how to use both. No torch is imported before a sink or a trace is asked for.
"""

from __future__ import annotations

from leadline.engine.profiling.phases import PHASES, PhaseClock, Phases, nvtx_sink, profiler_sink
from leadline.engine.profiling.trace import TraceRecorder, TraceResult

__all__ = [
    "PHASES",
    "PhaseClock",
    "Phases",
    "TraceRecorder",
    "TraceResult",
    "nvtx_sink",
    "profiler_sink",
]
