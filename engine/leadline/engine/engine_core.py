"""The engine core: requests in, tokens out. The loop that joins scheduler and runner.

    add_request ─▶ scheduler ─StepPlan─▶ runner.launch ─handle─▶ handle.wait ─▶ scheduler.update ─▶ outputs

With overlap, step N+1 is planned and launched before step N is read:

    host     | plan N | launch | plan N+1 | launch | wait N, update N | plan N+2 | ...
    device            |====== step N ======|====== step N+1 ======|== ...

Owns grammar matchers of structured sequences (one each, moved on by the tokens that come back) and the
speeds that load reports carry. Knows nothing of text, sockets or HTTP. One thread calls it.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from leadline.engine.config import EngineConfig
from leadline.engine.core import PoolListener, SchedulerStats, build_scheduler
from leadline.engine.core.plan import StepHandle, StepPlan, StepResult
from leadline.engine.core.stats import Speeds
from leadline.engine.errors import EngineDead, RequestError
from leadline.engine.messages import CoreOutput, CoreRequest
from leadline.engine.models.base import CausalLM
from leadline.engine.models.config import load_model_config
from leadline.engine.models.cost import attention_work
from leadline.engine.profiling import Phases, nvtx_sink
from leadline.engine.progress import ReportStage, no_report
from leadline.engine.runner import build_runner
from leadline.engine.runner.memory import oom_message
from leadline.engine.sampling_params import StructuredSpec

if TYPE_CHECKING:
    from leadline.engine.hub.local import LocalModel

__all__ = ["EngineCore", "Grammar", "GrammarFactory", "Speeds"]

logger = logging.getLogger("leadline.engine.core")

_FAILURES_IN_A_ROW = 3
"""Steps that may fail, one after the other, before the engine gives itself up."""
_EMA = 0.1
_PREFILL_STEP_MS = {"cpu": 0.0, "cuda": 50.0}
"""What a step with prompts may take while interactive requests decode, where the config leaves it open."""
_DRAFTING_ROWS = {"cpu": 4, "cuda": 16}
"""Decoding sequences up to which drafts pay (docs/decisions/015)."""


class Grammar(Protocol):
    """One sequence's way through a grammar (`frontend.structured.Matcher`)."""

    @property
    def finished(self) -> bool: ...
    def mask(self, out: np.ndarray) -> None: ...
    def accept(self, token_id: int) -> bool: ...


GrammarFactory = Callable[[StructuredSpec], Grammar]


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
        grammars: GrammarFactory | None = None,
        model: CausalLM | None = None,
    ) -> None:
        """Load the model and build everything; takes seconds to minutes.

        `grammars` makes matchers for structured output; None builds a `GrammarCompiler` over the model's
        tokenizer when the first such request comes. `report` hears how far loading is. Raises EngineError's
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
        overlap = config.overlap
        self.overlap = self.runner.device.type == "cuda" if overlap is None else overlap
        self._flights: deque[_Flight] = deque()
        self._grammars = grammars
        self._live: set[str] = set()
        self._matchers: dict[str, Grammar] = {}
        self._mask_words = (self.model_config.vocab_size + 31) // 32
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
        matcher = None
        if request.sampling.structured is not None:
            matcher = self._new_matcher(request)
        self.scheduler.add(request, time.monotonic())
        self._live.add(request.request_id)
        if matcher is not None:
            self._matchers[request.request_id] = matcher

    def abort(self, request_id: str) -> bool:
        """End a request; its last output has finish_reason "abort". False if it is not known (any more)."""
        return self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        """Whether `step` has something to do or to give out. Raises EngineDead if a rank has died."""
        if self._check_ranks is not None:
            self._check_ranks()
        return bool(self._flights) or self.scheduler.has_work()

    def _new_matcher(self, request: CoreRequest) -> Grammar:
        if self._grammars is None:
            from leadline.engine.frontend.structured import GrammarCompiler

            self._grammars = GrammarCompiler.from_folder(
                self.local.path,
                vocab_size=self.model_config.vocab_size,
                eos_token_ids=self.model_config.eos_token_ids,
            ).matcher
        spec = request.sampling.structured
        assert spec is not None
        matcher = self._grammars(spec)
        resumed = request.prompt_token_ids[len(request.prompt_token_ids) - request.num_resumed :]
        for token in resumed:
            if not matcher.accept(token):
                raise RequestError(
                    f"the resumed output does not follow the grammar at token {token}",
                    param="resume_token_ids",
                )
        return matcher

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
        with self.phases("schedule"):
            plan = self.scheduler.schedule(time.monotonic())
        if plan is not None:
            self._fill_masks(plan)
            if not self._flights:
                self._last_read = time.monotonic()
            # The flight is on the books before it is launched: if launching fails, `_fail` accounts for it.
            flight = _Flight(plan, _NOT_LAUNCHED)
            self._flights.append(flight)
            flight.handle = self.runner.launch(plan)
        if self._flights and (plan is None or len(self._flights) > int(self.overlap)):
            return self._read_oldest()
        return self._deliver(self.scheduler.take_outputs())

    def _read_oldest(self) -> list[CoreOutput]:
        flight = self._flights[0]
        with self.phases("wait"):
            result = flight.handle.wait()
        now = time.monotonic()
        self._measure(flight.plan, now - self._last_read)
        self._last_read = now
        self._flights.popleft()
        with self.phases("postprocess"):
            return self._deliver(self.scheduler.update(flight.plan, result, now))

    def _fill_masks(self, plan: StepPlan) -> None:
        for slot, request_id in self.scheduler.structured_rows():
            mask = np.zeros(self._mask_words, dtype=np.int32)
            self._matchers[request_id].mask(mask)
            plan.masks[slot] = mask

    def _deliver(self, outputs: list[CoreOutput]) -> list[CoreOutput]:
        """Move grammars on, forget what is finished."""
        for output in outputs:
            if self._matchers and (matcher := self._matchers.get(output.request_id)) is not None:
                for token in output.new_token_ids:
                    matcher.accept(token)
            if output.finish_reason is not None:
                self._live.discard(output.request_id)
                self._matchers.pop(output.request_id, None)
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
        self._matchers.clear()
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
