"""The engine core of a model that embeds or reranks, behind the same loop as `engine_core.EngineCore`.

    add_request ─▶ queue ─inputs of several requests─▶ runner ─▶ rows ─▶ outputs of requests that are complete

A step takes as many inputs as `max_num_batched_tokens` allows, and no more than the device computes in
`prefill_step_ms`, so that a request that comes during a step soon has its turn. One thread calls it.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from leadline.engine.config import EngineConfig
from leadline.engine.core import PoolListener, SchedulerStats
from leadline.engine.core.plan import StepPlan, StepRow
from leadline.engine.core.stats import Speeds
from leadline.engine.errors import EngineDead, QueueFull
from leadline.engine.messages import CoreOutput, FinishReason, PoolingRequest
from leadline.engine.models.config import ModelConfig
from leadline.engine.pooling.queue import Job, PoolingQueue
from leadline.engine.pooling.runner import PoolingRunner, build_pooling_runner
from leadline.engine.pooling.spec import PoolingSpec
from leadline.engine.profiling import Phases, nvtx_sink
from leadline.engine.runner.memory import oom_message
from leadline.engine.system.progress import ReportStage, no_report

if TYPE_CHECKING:
    from leadline.engine.hub.local import LocalModel

__all__ = ["PoolingCore"]

logger = logging.getLogger("leadline.engine.core")

_FAILURES_IN_A_ROW = 3
_STEP_MS = {"cpu": 100.0, "cuda": 50.0}
_LEAST_TOKENS = 512
"""Of a step, however slow the device: smaller ones waste it."""
_EMA = 0.2
_NOT_FINITE = "the model's values for an input are not finite numbers: its dtype may be too small for it"


class PoolingCore:
    """One model on one device. `max_model_len`: tokens of the longest input."""

    num_kv_blocks = 0

    def __init__(
        self,
        config: EngineConfig,
        local: LocalModel,
        spec: PoolingSpec,
        *,
        progress: bool = True,
        report: ReportStage = no_report,
        runner: PoolingRunner | None = None,
    ) -> None:
        """Load the model, unless `runner` has one. Raises ConfigError, UnsupportedModel, OutOfMemory."""
        if isinstance(spec.model, ModelConfig) and (unknown := spec.model.unknown_fields):
            logger.warning(
                "config.json sets fields that are not known here and have no effect: %s", ", ".join(unknown)
            )
        self.config, self.spec = config, spec
        self.max_model_len = spec.max_tokens
        self.runner = runner or build_pooling_runner(config, local, spec, progress=progress, report=report)
        self.phases = Phases(nvtx_sink() if config.nvtx else None)
        self.on_enter: Callable[[StepPlan], None] = lambda plan: None
        """Called with what describes each step before it is computed."""
        step_ms = config.prefill_step_ms
        self._step_seconds = (_STEP_MS[self.runner.device.type] if step_ms is None else step_ms) / 1000
        self._queue = PoolingQueue(config.class_weights)
        self._ended: list[CoreOutput] = []
        """Outputs of requests that ended without a step."""
        self._steps = self._requests = self._timeouts = self._failures = 0
        self._rate = 0.0
        gc.collect()
        gc.freeze()

    def add_request(self, request: PoolingRequest) -> None:
        """Queue a validated request. Raises QueueFull."""
        if self._queue.ahead_of(len(request.inputs)) >= max(1, self.config.max_queued_requests):
            raise QueueFull(f"{self.config.max_queued_requests} inputs wait (max_queued_requests)")
        self._queue.add(request)
        self._requests += 1

    def abort(self, request_id: str) -> bool:
        """End a request; its output has finish_reason "abort". False: it is unknown or has ended."""
        return self._end(request_id, "abort")

    def has_work(self) -> bool:
        """Whether `step` has something to do or to give out."""
        return bool(self._ended) or self._queue.has_inputs

    def step(self) -> list[CoreOutput]:
        """Compute the next inputs and return the outputs of requests that are complete.

        A step that fails ends the requests that have inputs in it; EngineDead is raised when several in a row
        fail."""
        now = time.monotonic()
        for job in list(self._queue):
            if job.request.deadline is not None and now >= job.request.deadline:
                self._timeouts += self._end(job.request.request_id, "deadline")
        with self.phases("schedule"):
            taken = self._queue.take(
                now, max_tokens=self._max_tokens(), max_inputs=self.config.max_concurrent_requests
            )
        # Only now: with a queue timeout of 0 a request may still be part of the first step after it came.
        for job in list(self._queue):
            wait = job.request.queue_timeout
            if job.started is None and wait is not None and now - job.request.arrival >= wait:
                self._timeouts += self._end(job.request.request_id, "queue_timeout")
        outputs, self._ended = self._ended, []
        if not taken:
            return outputs
        inputs = [job.request.inputs[index] for job, index in taken]
        self.on_enter(self._plan(inputs))
        try:
            with self.phases("forward"):
                rows = self.runner.run(inputs, [_boundary(job, index) for job, index in taken])
        except Exception as error:
            return outputs + self._fail(taken, error)
        self._failures = 0
        seconds = time.monotonic() - now
        tokens = sum(map(len, inputs))
        if tokens >= 32 and seconds > 0:
            rate = tokens / seconds
            self._rate = rate if not self._rate else self._rate + _EMA * (rate - self._rate)
        for (job, index), row, finite in zip(taken, rows, np.isfinite(rows).all(axis=1), strict=True):
            if not finite:
                self._end(job.request.request_id, "error", _NOT_FINITE)
            if job.gone:
                continue
            job.results[index] = self._cut(row, job.request.dimensions).tobytes()
            job.missing -= 1
            if not job.missing:
                self._queue.remove(job.request.request_id)
                outputs.append(_complete(job))
        ended, self._ended = self._ended, []
        return outputs + ended

    def stats(self) -> SchedulerStats:
        """Numbers for metrics and load reports. There are no KV blocks and no generated tokens."""
        waiting = {"interactive": 0, "batch": 0}
        running = tokens = 0
        for job in self._queue:
            tokens += job.tokens_left
            if job.started is None:
                waiting[job.request.priority_class] += 1
            else:
                running += 1
        return SchedulerStats(
            running=running,
            prefilling=running,
            waiting=sum(waiting.values()),
            waiting_by_class=waiting,
            parked=0,
            queued_prefill_tokens=tokens,
            blocks_total=0,
            blocks_free=0,
            blocks_used=0,
            blocks_cached=0,
            steps_in_flight=0,
            steps_total=self._steps,
            requests_total=self._requests,
            preemptions_total=0,
            prefix_query_tokens_total=0,
            prefix_hit_tokens_total=0,
            generated_tokens_total=0,
            timeouts_total=self._timeouts,
        )

    def speeds(self) -> Speeds:
        """How fast this engine is at present."""
        return Speeds(self._rate, 0.0)

    def reset_prefix_cache(self) -> int:
        """There is no cache: 0."""
        return 0

    def listen(self, listener: PoolListener) -> None:
        """Nothing enters or leaves a cache that is not there."""

    def rest(self) -> None:
        """Do what an idle core does: nothing."""

    def warm(self) -> None:
        """Compute one short input, so that the first request does not pay for kernels built on first use."""
        self.runner.run([[0] * min(4, self.max_model_len)], [None])

    def _max_tokens(self) -> int:
        """Tokens of the next step."""
        most = self.config.max_num_batched_tokens
        if not self._step_seconds or not self._rate:
            return most
        return min(most, max(_LEAST_TOKENS, int(self._rate * self._step_seconds)))

    def _plan(self, inputs: list[list[int]]) -> StepPlan:
        """What a watch for hung steps sees of this one."""
        self._steps += 1
        lengths = sorted(map(len, inputs))
        return StepPlan(self._steps, rows=[StepRow(0, 0, length, sample=False) for length in lengths])

    def _cut(self, row: np.ndarray, dimensions: int | None) -> np.ndarray:
        if dimensions is None:
            return row
        row = row[:dimensions]
        return row / max(float(np.linalg.norm(row)), 1e-12) if self.spec.normalize else row

    def _end(self, request_id: str, reason: FinishReason, error: str | None = None) -> bool:
        job = self._queue.remove(request_id)
        if job is not None:
            self._ended.append(CoreOutput(request_id=request_id, finish_reason=reason, error=error))
        return job is not None

    def _fail(self, taken: list[tuple[Job, int]], error: Exception) -> list[CoreOutput]:
        """End the requests of a step that failed."""
        self._failures += 1
        if isinstance(error, torch.OutOfMemoryError):
            message = oom_message(self.config, "in a step", self.max_model_len)
            logger.error("%s (%s)", message, str(error).splitlines()[0])
            torch.cuda.empty_cache()
        else:
            message = f"the engine failed in a step: {type(error).__name__}: {error}"
            logger.exception("a step failed")
        for name in {job.request.request_id for job, _ in taken}:
            self._end(name, "error", message)
        if self._failures >= _FAILURES_IN_A_ROW:
            raise EngineDead(f"{self._failures} steps failed in a row; the last: {message}") from error
        outputs, self._ended = self._ended, []
        return outputs


def _boundary(job: Job, index: int) -> int | None:
    boundaries = job.request.boundaries
    return None if boundaries is None else boundaries[index]


def _complete(job: Job) -> CoreOutput:
    assert job.started is not None
    return CoreOutput(
        request_id=job.request.request_id,
        finish_reason="stop",
        queue_seconds=job.started - job.request.arrival,
        pooled=b"".join(row for row in job.results if row is not None),
    )
