"""An engine core that misbehaves on command, for tests of the process around it. Its tokens count up from
100.

The first token of a prompt says what it does: CRASH raises in the step, EXIT leaves the process, SLOW takes
50 ms a step, SLEEP four seconds, REFUSE is refused on admission. STEP announces its step, as the real core
does, and takes as many tenths of a second as the second token says; such steps may last a second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from leadline.engine import wire
from leadline.engine.config import EngineConfig
from leadline.engine.core.block_pool import PoolListener
from leadline.engine.core.plan import StepPlan, StepRow
from leadline.engine.core.stats import SchedulerStats, Speeds
from leadline.engine.core_process import step_bounds
from leadline.engine.errors import ConfigError, QueueFull
from leadline.engine.messages import CoreOutput, CoreRequest

CRASH, EXIT, SLOW, REFUSE, SLEEP, STEP = 40_001, 40_002, 40_003, 40_004, 40_005, 40_006


class ScriptedCore:
    max_model_len = 512
    num_kv_blocks = 64
    on_enter: Callable[[StepPlan], None]

    def __init__(self) -> None:
        self._live: dict[str, tuple[CoreRequest, int]] = {}
        self._steps = 0

    def add_request(self, request: CoreRequest) -> None:
        if request.prompt_token_ids[0] == REFUSE:
            raise QueueFull("the queue is full", retry_after=7.0)
        self._live[request.request_id] = (request, 0)

    def abort(self, request_id: str) -> None:
        self._live.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._live)

    def rest(self) -> None:
        pass

    def step(self) -> list[CoreOutput]:
        self._steps += 1
        outputs = []
        for request_id, (request, done) in list(self._live.items()):
            match request.prompt_token_ids[0]:
                case 40_001:
                    raise ZeroDivisionError("a bug in the core")
                case 40_002:
                    os._exit(9)
                case 40_003:
                    time.sleep(0.05)
                case 40_005:
                    time.sleep(4.0)
                case 40_006:
                    plan = StepPlan(self._steps)
                    plan.rows = [StepRow(0, 0, 1, True)]
                    self.on_enter(plan)
                    time.sleep(request.prompt_token_ids[1] / 10)
            done += 1
            last = done >= (request.sampling.max_tokens or 16)
            outputs.append(
                CoreOutput(
                    request_id=request_id,
                    new_token_ids=[99 + done],
                    finish_reason="length" if last else None,
                    queue_seconds=0.0 if done == 1 else None,
                )
            )
            if last:
                del self._live[request_id]
            else:
                self._live[request_id] = (request, done)
        return outputs

    def stats(self) -> SchedulerStats:
        running = len(self._live)
        return SchedulerStats(
            running=running,
            prefilling=0,
            waiting=0,
            waiting_by_class={},
            parked=0,
            queued_prefill_tokens=0,
            blocks_total=self.num_kv_blocks,
            blocks_free=self.num_kv_blocks - running,
            blocks_used=running,
            blocks_cached=0,
            steps_in_flight=0,
            steps_total=self._steps,
            requests_total=0,
            preemptions_total=0,
            prefix_query_tokens_total=0,
            prefix_hit_tokens_total=0,
            generated_tokens_total=0,
            timeouts_total=0,
        )

    def reset_prefix_cache(self) -> int:
        return 3

    def speeds(self) -> Speeds:
        return Speeds(0.0, 0.0)

    def listen(self, listener: PoolListener) -> None:
        """It caches nothing."""


def build(config: EngineConfig, report: Callable[[wire.Progress | wire.Resolved], None]) -> ScriptedCore:
    if config.model == "unsupported":
        raise ConfigError("dtype int3 is not a thing; use float32")
    if config.model == "large":
        import torch  # takes seconds, which the other tests need not wait

        torch.empty(1 << 50)
    if config.model == "broken":
        raise ZeroDivisionError("a bug while loading")
    step_bounds._LEAST_SECONDS = 1.0
    report(wire.Progress("loading", 0.5, "half of it"))
    report(wire.Resolved(config.model, "scripted", "1"))
    return ScriptedCore()
