"""Where a core process takes orders for traces: one at a time, answered when the file is written."""

from __future__ import annotations

import logging
from collections.abc import Callable

from leadline.engine import wire
from leadline.engine.profiling.phases import Phases
from leadline.engine.profiling.trace import TraceRecorder

__all__ = ["TraceRequests"]

logger = logging.getLogger("leadline.engine.core")


class TraceRequests:
    """Belongs to the core's loop: `ask` for each order, `step_done` after each step, `look` each time
    round."""

    def __init__(self, directory: str | None, phases: Phases, send: Callable[[wire.Profiled], None]) -> None:
        self._directory = directory
        self._phases = phases
        self._send = send
        self._recorder: TraceRecorder | None = None
        self._call_id = 0

    def ask(self, order: wire.Profile) -> None:
        if self._directory is None:
            return self._refuse(order.call_id, "profiling_off", "the engine has no profile_dir")
        if self._recorder is not None:
            return self._refuse(
                order.call_id, "profile_running", "a profile is being recorded; try again when it is done"
            )
        try:
            self._recorder = TraceRecorder(
                self._directory, self._phases, steps=order.steps, seconds=order.seconds
            )
        except OSError as error:
            return self._refuse(order.call_id, "profile_failed", f"profile_dir cannot be used: {error}")
        self._call_id = order.call_id

    def step_done(self) -> None:
        if self._recorder is not None:
            self._recorder.step_done()

    def look(self) -> None:
        """Finish the trace that has what it needs."""
        recorder = self._recorder
        if recorder is None or not recorder.done:
            return
        self._recorder = None
        try:
            result = recorder.finish()
        except OSError as error:
            return self._refuse(
                self._call_id, "profile_failed", f"the trace could not be written to profile_dir: {error}"
            )
        logger.info("recorded a profile of %d steps in %.1f s: %s", result.steps, result.seconds, result.path)
        self._send(wire.Profiled(self._call_id, result.path, result.steps, result.seconds))

    def _refuse(self, call_id: int, code: str, error: str) -> None:
        self._send(wire.Profiled(call_id, code=code, error=error))
