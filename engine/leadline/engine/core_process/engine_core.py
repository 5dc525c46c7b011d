"""The engine core: requests in, tokens out. The loop that joins scheduler and runner.

    add_request ─▶ scheduler ─StepPlan─▶ runner.launch ─handle─▶ handle.wait ─▶ scheduler.update ─▶ outputs

With overlap, step N+1 is planned and launched before step N is read:

    host     | plan N | launch | plan N+1 | launch | wait N, update N | plan N+2 | ...
    device            |====== step N ======|====== step N+1 ======|== ...

Owns the masks of structured sequences: their grammars live in other processes (`grammars`), receive the
tokens that come back, and answer with what may follow. A sequence without its mask sits out steps. Owns the
speeds that load reports carry as well. Knows nothing of text, sockets or HTTP. One thread calls it.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from leadline.engine.config import EngineConfig
from leadline.engine.core import PoolListener, SchedulerStats, build_scheduler
from leadline.engine.core.plan import StepHandle, StepPlan, StepResult
from leadline.engine.core.sequence import answer_of
from leadline.engine.core.stats import Speeds
from leadline.engine.errors import EngineDead, QueueFull, RequestError
from leadline.engine.grammars.pool import GrammarHosts, MaskOrError
from leadline.engine.messages import CoreOutput, CoreRequest, Failure
from leadline.engine.models.base import CausalLM
from leadline.engine.models.config import load_model_config
from leadline.engine.models.cost import attention_work
from leadline.engine.profiling import Phases, nvtx_sink
from leadline.engine.runner import build_runner
from leadline.engine.runner.memory import oom_message
from leadline.engine.system.progress import ReportStage, no_report

if TYPE_CHECKING:
    from leadline.engine.hub.local import LocalModel

__all__ = ["EngineCore", "Speeds"]

logger = logging.getLogger("leadline.engine.core")

_FAILURES_IN_A_ROW = 3
"""Steps that may fail, one after the other, before the engine gives itself up."""
_EMA = 0.1
_PREFILL_STEP_MS = {"cpu": 80.0, "cuda": 50.0}
"""What a step with prompts may take while interactive requests decode, where the config leaves it open."""
_MASK_SECONDS = 0.002
"""How long a step waits for masks that usually come at once."""
_IDLE_SECONDS = 0.005
"""The same, where there is nothing else to do."""
_MOST_QUEUED_GRAMMARS = 256
_DRAFTING_ROWS = {"cpu": 4, "cuda": 16}
"""Decoding sequences up to which drafts pay (docs/decisions/015)."""


@dataclass(slots=True)
class _Flight:
    plan: StepPlan
    handle: StepHandle


class EngineCore:
    """One model on one device, serving.

    max_model_len: longest sequence in tokens. num_kv_blocks: size of the pool. model_config: the model's
    facts.
    """

    def __init__(
        self,
        config: EngineConfig,
        local: LocalModel,
        *,
        progress: bool = True,
        report: ReportStage = no_report,
        listener: PoolListener | None = None,
        model: CausalLM | None = None,
    ) -> None:
        """Load the model and build everything; takes seconds to minutes.

        `report` hears how far loading is. Raises EngineError's
        kinds: ConfigError, UnsupportedModel, OutOfMemory …
        """
        self.config = config.validate()
        self.local = local
        self.model_config = load_model_config(local.path)
        if unknown := self.model_config.unknown_fields:
            logger.warning(
                "config.json sets fields that are not known here and have no effect: %s", ", ".join(unknown)
            )
        self.runner, self.max_model_len = build_runner(
            config, local, self.model_config, progress=progress, report=report, model=model
        )
        self._check_ranks: Callable[[], None] | None = getattr(self.runner, "check_alive", None)
        self.num_kv_blocks = self.runner.num_blocks
        self.scheduler = build_scheduler(
            config,
            num_blocks=self.num_kv_blocks,
            max_model_len=self.max_model_len,
            model=local.model_id,
            revision=local.revision,
            listener=listener,
            speculative_max_batch=_DRAFTING_ROWS[self.runner.device.type],
            prefill_step_ms=_PREFILL_STEP_MS[self.runner.device.type],
            attention_work=attention_work(self.model_config),
        )
        self.phases = Phases(nvtx_sink() if config.nvtx else None)
        """Ranges around the phases of each step; its runner enters the ones that are its own."""
        getattr(self.runner, "runner", self.runner).phases = self.phases
        self.on_enter: Callable[[StepPlan], None] = lambda plan: None
        """Called with each step's plan before the step is launched and before it is waited for."""
        overlap = config.overlap
        self.overlap = self.runner.device.type == "cuda" if overlap is None else overlap
        self._flights: deque[_Flight] = deque()
        self._grammars: GrammarHosts | None = None
        self._masks: dict[str, np.ndarray] = {}
        """For the next token of structured requests; missing while it is awaited."""
        self._live: set[str] = set()
        self._failures = 0
        self._last_read = 0.0
        self._prefill_rate = 0.0
        self._decode_seconds = 0.0
        self._garbage = False
        gc.collect()
        gc.freeze()

    # -- requests --------------------------------------------------------------------------------------------

    def add_request(self, request: CoreRequest) -> None:
        """Queue a validated request. Raises RequestError or QueueFull; then nothing of it remains."""
        spec = request.sampling.structured
        if spec is not None and self._hosts().num_queued >= _MOST_QUEUED_GRAMMARS:
            raise QueueFull(f"{_MOST_QUEUED_GRAMMARS} requests wait for their grammar to be compiled")
        self.scheduler.add(request, time.monotonic(), held=spec is not None)
        self._live.add(request.request_id)
        if spec is not None:
            resumed = request.prompt_token_ids[len(request.prompt_token_ids) - request.num_resumed :]
            resumed = answer_of(request.thought, resumed)
            self._hosts().open(request.request_id, spec, resumed, client=request.client)

    def abort(self, request_id: str) -> bool:
        """End a request; its last output has finish_reason "abort". False: it is unknown or has ended."""
        return self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        """Whether `step` has something to do or to give out. Raises EngineDead if a rank has died."""
        if self._check_ranks is not None:
            self._check_ranks()
        return bool(self._flights) or self.scheduler.has_work()

    def rest(self) -> None:
        """Give back what is kept for requests that may come again. Called while there is no work."""
        if self._grammars is not None:
            self._grammars.end_idle()

    def _hosts(self) -> GrammarHosts:
        if self._grammars is None:
            config = self.model_config
            self._grammars = GrammarHosts(self.local.path, config.vocab_size, config.eos_token_ids)
        return self._grammars

    # -- the loop --------------------------------------------------------------------------------------------

    def step(self) -> list[CoreOutput]:
        """Do one step's worth of work and return what came of it.

        Without overlap: plan, launch, wait, update. With it: plan and launch the next step, then read the one
        before. A step that fails ends every request with finish_reason "error" and a message, and leaves
        the engine usable; EngineDead is raised when several in a row fail.
        """
        try:
            outputs = self._step()
        except EngineDead:
            raise
        except Exception as error:
            outputs = self._fail(error)
        else:
            if outputs:
                self._failures = 0
                self._garbage = True
        return outputs

    def _step(self) -> list[CoreOutput]:
        if self._flights and self.scheduler.wants_to_draft:
            return self._read_oldest()
        if self._grammars is not None:
            self._take_masks(self._grammars.poll(_MASK_SECONDS, quick=True))
        with self.phases("schedule"):
            plan = self.scheduler.schedule(time.monotonic())
        if plan is not None:
            self._fill_masks(plan)
            if not self._flights:
                self._last_read = time.monotonic()
            # The step is recorded before it is launched: if the launch fails, `_fail` accounts for it.
            flight = _Flight(plan, _NOT_LAUNCHED)
            self._flights.append(flight)
            self.on_enter(plan)
            flight.handle = self.runner.launch(plan)
        if self._flights and (plan is None or len(self._flights) > int(self.overlap)):
            return self._read_oldest()
        outputs = self._deliver(self.scheduler.take_outputs())
        if plan is None and not outputs and self._grammars is not None:
            self._take_masks(self._grammars.poll(_IDLE_SECONDS))
        return outputs

    def _read_oldest(self) -> list[CoreOutput]:
        flight = self._flights[0]
        self.on_enter(flight.plan)
        with self.phases("wait"):
            result = flight.handle.wait()
        now = time.monotonic()
        self._measure(flight.plan, now - self._last_read)
        self._last_read = now
        self._flights.popleft()
        with self.phases("postprocess"):
            return self._deliver(self.scheduler.update(flight.plan, result, now))

    def _take_masks(self, found: list[tuple[str, MaskOrError]]) -> None:
        """Let requests go on that have their mask, and end those that will get none."""
        for request_id, result in found:
            if request_id not in self._live:
                continue
            if not isinstance(result, RequestError):
                self._masks[request_id] = result
                self.scheduler.unblock(request_id)
                continue
            kind = type(result).__name__
            self.scheduler.fail(request_id, Failure(kind, result.message, result.param, result.code))
            if result.status >= 500:
                logger.error("request %s: %s", request_id, result.message)

    def _fill_masks(self, plan: StepPlan) -> None:
        for row in self.scheduler.masked_rows():
            allowed = row.allowed
            if not allowed.tokens:
                plan.masks[row.slot] = self._masks[row.request_id]
                continue
            words = (self.model_config.vocab_size + 31) // 32
            mask = self._masks[row.request_id].copy() if allowed.grammar else np.zeros(words, np.int32)
            bits = mask.view(np.uint32)
            for token in allowed.tokens:
                bits[token >> 5] |= np.uint32(1 << (token & 31))
            plan.masks[row.slot] = mask

    def _deliver(self, outputs: list[CoreOutput]) -> list[CoreOutput]:
        """Move grammars on, forget what is finished."""
        grammars = self._grammars
        for output in outputs:
            request_id = output.request_id
            if output.finish_reason is not None:
                self._live.discard(request_id)
                if grammars is not None:
                    self._masks.pop(request_id, None)
                    grammars.close(request_id)
            elif (
                grammars is not None
                and output.new_token_ids
                and request_id in self._masks
                and self.scheduler.follows_grammar(request_id)
            ):
                del self._masks[request_id]
                self.scheduler.block(request_id)
                grammars.advance(request_id, output.new_token_ids)
        return outputs

    def _fail(self, error: Exception) -> list[CoreOutput]:
        """End every request with `error`; afterwards pool, slots and flights are as if nothing ran."""
        self._failures += 1
        if isinstance(error, torch.OutOfMemoryError):
            message = oom_message(self.config, "in a step", self.max_model_len)
            logger.error("%s (%s)", message, str(error).splitlines()[0])
        else:
            message = f"the engine failed in a step: {type(error).__name__}: {error}"
            logger.exception("a step failed")
        scheduler = self.scheduler
        for request_id in self._live:
            scheduler.abort(request_id)
            if self._grammars is not None:
                self._grammars.close(request_id)
        self._live.clear()
        outputs = scheduler.take_outputs()
        for output in outputs:
            output.finish_reason, output.error = "error", message
        # Every planned step is accounted for; its sequences are finished, so the values do not matter.
        while self._flights:
            flight = self._flights.popleft()
            count = flight.plan.num_samples
            empty = StepResult(flight.plan.step_id, [0] * count, [None] * count)
            scheduler.update(flight.plan, empty, time.monotonic())
        # Blocks of a step that did not run may be in the prefix index already.
        scheduler.reset_prefix_cache()
        self._masks.clear()
        if self.runner.device.type == "cuda" and isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        if self._failures >= _FAILURES_IN_A_ROW:
            raise EngineDead(f"{self._failures} steps failed in a row; the last: {message}") from error
        return outputs

    def listen(self, listener: PoolListener) -> None:
        """Tell `listener` of every hash that enters or leaves the prefix index from now on."""
        self.scheduler.pool.listener = listener

    @property
    def rank_pids(self) -> list[int]:
        """Processes of further ranks."""
        ranks = getattr(self.runner, "ranks", None)
        return [] if ranks is None else [worker.process.pid for worker in ranks.workers]

    # -- state -----------------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """Numbers for metrics and load reports."""
        return self.scheduler.stats()

    def speeds(self) -> Speeds:
        """How fast this engine is at present, for load reports."""
        return Speeds(self._prefill_rate, self._decode_seconds)

    def reset_prefix_cache(self) -> int:
        """Forget cached prefixes; returns how many blocks were dropped from the index."""
        return self.scheduler.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raise IntegrityError if an invariant of scheduler or pool is broken."""
        self.scheduler.check_integrity()

    def collect_garbage_if_idle(self) -> bool:
        """Run the collector if there is no work and there was some since the last call."""
        if self._garbage and not self.has_work():
            self._garbage = False
            gc.collect()
            return True
        return False

    def _measure(self, plan: StepPlan, seconds: float) -> None:
        self.scheduler.observe(plan, seconds)
        tokens = plan.num_tokens
        prefill = tokens - sum(row.count for row in plan.rows if row.count == 1 or row.tokens is not None)
        if not prefill:
            self._decode_seconds = _average(self._decode_seconds, seconds)
        elif prefill >= 32 and seconds > 0:
            self._prefill_rate = _average(self._prefill_rate, tokens / seconds)


class _NotLaunched:
    def wait(self) -> Any:
        raise RuntimeError("this step was never launched")


_NOT_LAUNCHED = _NotLaunched()


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else old + _EMA * (new - old)
