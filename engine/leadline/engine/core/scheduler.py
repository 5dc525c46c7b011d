"""The scheduler: requests in, step plans out, step results in, outputs out.

    add / abort ──▶ ┌───────────┐ ──schedule──▶ StepPlan ──▶ runner
                    │ Scheduler │                               │
    CoreOutput  ◀── └───────────┘ ◀──update──── StepResult ◀────┘

The loop around it keeps three promises:
  * every plan that `schedule` returned is executed, in that order;
  * `update` is called once for each, in that order, with as many plans in between as it likes (overlap);
  * after `schedule`, `take_outputs` is asked for outputs that belong to no step (aborts, timeouts).

Positions advance when a step is planned; token values arrive with `update`. Everything that depends on values
(EOS, stop ids, hashes of output blocks) happens there, everything known beforehand (lengths, blocks) here.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from leadline.engine.core.block_pool import BlockPool, IntegrityError
from leadline.engine.core.drafter import Drafter
from leadline.engine.core.plan import StepPlan, StepResult
from leadline.engine.core.planning import Decode, Prefill, StepTime
from leadline.engine.core.policy import SchedulingPolicy
from leadline.engine.core.results import Flight, Results
from leadline.engine.core.sequence import GRAMMAR, Allowed, Sequence, State, Thought
from leadline.engine.core.settings import SchedulerConfig
from leadline.engine.core.speculation import Speculation
from leadline.engine.core.state import SchedulerState
from leadline.engine.core.stats import SchedulerStats
from leadline.engine.errors import QueueFull, RequestError
from leadline.engine.messages import CoreOutput, CoreRequest, Failure
from leadline.protocol.chain import ChainNamespace

__all__ = ["MaskedRow", "Scheduler", "Timeouts"]


Kind = Literal["queue_timeout", "deadline"]


class Timeouts:
    """Times at which something may have to end. Entries of finished sequences are dropped lazily."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Kind, Sequence]] = []
        self._unplanned: list[tuple[float, Sequence]] = []
        """Queue timeouts of requests that no step has been planned for yet."""
        self._sweep_at = 1024

    def watch(self, seq: Sequence, queue_timeout: float | None) -> None:
        """Watch the request's queue timeout (seconds after arrival) and deadline, where it has them."""
        request = seq.request
        if queue_timeout is not None:
            self._unplanned.append((request.arrival + queue_timeout, seq))
        if request.deadline is not None:
            self._push(request.deadline, "deadline", seq)

    def planned(self) -> None:
        """A step was planned that could admit waiting requests: a queue timeout of 0 means that step."""
        for when, seq in self._unplanned:
            if seq.admitted_at is None:
                self._push(when, "queue_timeout", seq)
        self._unplanned.clear()

    def _push(self, when: float, kind: Kind, seq: Sequence) -> None:
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if not entry[3].finished]
            heapq.heapify(self._heap)
            self._sweep_at = max(1024, 2 * len(self._heap))
        heapq.heappush(self._heap, (when, seq.seq_id, kind, seq))

    def due(self, now: float) -> list[tuple[Sequence, Kind]]:
        """Sequences to end now; a queue timeout counts only for those that were never admitted."""
        ended: list[tuple[Sequence, Kind]] = []
        heap = self._heap
        while heap and heap[0][0] <= now:
            _, _, kind, seq = heapq.heappop(heap)
            if not seq.finished and (kind == "deadline" or seq.admitted_at is None):
                ended.append((seq, kind))
        return ended


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """A row that may sample only what `allowed` says."""

    slot: int
    request_id: str
    allowed: Allowed


def _masked(seq: Sequence) -> MaskedRow:
    return MaskedRow(seq.slot, seq.request_id, GRAMMAR if seq.thought is None else seq.thought.allowed)


class Scheduler:
    """Continuous batching over one block pool. Single-threaded; no call blocks."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        policy: SchedulingPolicy,
        make_drafter: Callable[[CoreRequest], Drafter] | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self._state = SchedulerState(config, pool, policy)
        self._speculation = Speculation(config, make_drafter)
        self._decode = Decode(self._state, self._speculation)
        seconds = config.prefill_step_seconds
        self._step_time = StepTime(seconds, config.attention_work) if seconds else None
        self._prefill = Prefill(self._state, self._step_time)
        self._results = Results(self._state, self._speculation)
        self._timeouts = Timeouts()
        self._flights: deque[Flight] = deque()
        self._masked: list[MaskedRow] = []
        self._next_seq_id = 0
        self._next_step_id = 0
        self._num_timeouts = 0
        self._salts: dict[str, bytes] = {}

    # -- requests --------------------------------------------------------------------------------------------

    def add(self, request: CoreRequest, now: float, *, held: bool = False) -> None:
        """Queue a request, or hold it back until `unblock`. Raises QueueFull (429), or RequestError (400) if
        it can never run here."""
        state, config = self._state, self.config
        prompt = request.prompt_token_ids
        original = len(prompt) - request.num_resumed
        if request.request_id in state.live:
            raise RequestError(f"request id {request.request_id!r} is already in use", param="request_id")
        if original < 1:
            raise RequestError("the prompt must have at least one token", param="prompt")
        if len(prompt) >= config.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; with one token of output the context length of "
                f"{config.max_model_len} tokens allows {config.max_model_len - 1}",
                param="prompt",
                code="context_length_exceeded",
            )
        pool_tokens = self.pool.num_blocks * config.block_size
        if len(prompt) > pool_tokens:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but the whole KV cache holds {pool_tokens} "
                f"({self.pool.num_blocks} blocks of {config.block_size} tokens)",
                param="prompt",
                code="context_length_exceeded",
            )
        sampling = request.sampling
        # The last token needs no KV, hence pool_tokens + 1: a sequence that fills the whole pool ends with
        # `length` (E21).
        max_len = min(config.max_model_len, pool_tokens + 1)
        if sampling.max_tokens is not None:
            max_len = min(max_len, original + sampling.max_tokens)
        if max_len <= len(prompt):
            raise RequestError(
                f"max_tokens is {sampling.max_tokens}, but {request.num_resumed} tokens exist already",
                param="max_tokens",
            )
        if state.num_waiting >= config.max_queued_requests + len(state.free_slots):
            raise QueueFull(
                f"{state.num_waiting} requests are waiting and {len(state.live) - state.num_waiting} run; "
                f"at most {config.max_queued_requests} may wait (max_queued_requests)"
            )
        seq = Sequence(
            seq_id=self._next_seq_id,
            request=request,
            request_id=request.request_id,
            priority_class=request.priority_class,
            token_ids=list(prompt),
            prompt_len=original,
            max_len=max_len,
            last_start=max_len - 1,
            stop_ids=frozenset(request.eos_token_ids) | frozenset(sampling.stop_token_ids),
            min_len=original + sampling.min_tokens,
            root=self._root(request.cache_salt),
            sync=sampling.structured is not None,
            structured=sampling.structured is not None,
            reads_output=sampling.reads_output,
            wants_logprobs=sampling.logprobs is not None,
            wants_prompt_logprobs=sampling.prompt_logprobs is not None,
            may_draft=self._speculation.allowed(request),
            held=held,
            blocked=held,
        )
        if request.thought is not None:
            seq.thought = Thought(request.thought, structured=seq.structured)
            for token in prompt[original:]:
                seq.thought.take(token)
            seq.follow_thought()
        self._next_seq_id += 1
        state.live[seq.request_id] = seq
        state.start_waiting(seq)
        timeout = config.queue_timeout if request.queue_timeout is None else request.queue_timeout
        self._timeouts.watch(seq, timeout)

    def _root(self, cache_salt: str) -> bytes:
        if not self.config.prefix_caching:
            return b""
        root = self._salts.get(cache_salt)
        if root is None:
            config = self.config
            root = ChainNamespace(
                model=config.model,
                revision=config.revision,
                cache_salt=cache_salt,
                block_size=config.block_size,
            ).root()
            if len(self._salts) >= 1024:
                self._salts.clear()
            self._salts[cache_salt] = root
        return root

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is.

        Its last output has finish_reason `abort`. False if it is unknown.
        """
        seq = self._state.live.get(request_id)
        if seq is None:
            return False
        self._state.finish_early(seq, "abort")
        return True

    def block(self, request_id: str) -> None:
        """Plan no sampling row of a request before `unblock`: the mask for its next token is not known."""
        if (seq := self._state.live.get(request_id)) is not None:
            seq.blocked = True

    def unblock(self, request_id: str) -> None:
        """The mask for a request's next token is there."""
        if (seq := self._state.live.get(request_id)) is not None:
            seq.blocked = False
            if seq.held:
                seq.held = False
                self._state.queue(seq)

    def fail(self, request_id: str, failure: Failure) -> None:
        """End a request with finish_reason `error`."""
        if (seq := self._state.live.get(request_id)) is not None:
            self._state.finish_early(seq, "error")
            output = self._state.early_outputs[-1]
            output.error, output.failure = failure.message, failure

    # -- steps -----------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """The next step; None if nothing can be computed before a step is read or a request comes."""
        self._expire(now)
        state = self._state
        plan = StepPlan(self._next_step_id)
        preemptions = state.num_preemptions
        ones, one_seqs = self._decode.plan(plan)
        longs, long_seqs = [], []
        budget = self.config.max_num_batched_tokens - sum(row.count for row in ones)
        if state.prefilling or state.num_waiting:
            # Blocks that a preemption freed are for running sequences, and then for the preempted one: no new
            # sequence is admitted meanwhile.
            may_admit = not state.draining and preemptions == state.num_preemptions
            for row, seq in zip(*self._prefill.plan(plan, budget, now, may_admit), strict=True):
                if row.count == 1:
                    ones.append(row)
                    one_seqs.append(seq)
                else:
                    longs.append(row)
                    long_seqs.append(seq)
        self._timeouts.planned()
        if not ones and not longs:
            return None
        if any(row.count > 1 for row in ones):
            # Drafting rows stand with the chunks.
            rows = sorted(zip(ones, one_seqs, strict=True), key=lambda pair: pair[0].count > 1)
            ones, one_seqs = [row for row, _ in rows], [seq for _, seq in rows]
        plan.rows = ones + longs
        plan.released, state.released = state.released, []
        self._next_step_id += 1
        flight = self._results.flight(plan, one_seqs + long_seqs)
        self._flights.append(flight)
        self._masked = [_masked(seq) for seq in flight.sampled if seq.sync] if state.guided else []
        return plan

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[CoreOutput]:
        """Read the result of the oldest step in flight.

        Returns its outputs, after those that belong to no step.
        """
        flight = self._flights.popleft()
        if not flight.step_id == plan.step_id == result.step_id:
            raise RuntimeError(
                f"oldest step in flight: {flight.step_id}, got plan {plan.step_id}, result {result.step_id}"
            )
        self._expire(now)
        outputs = self.take_outputs()
        outputs.extend(self._results.apply(flight, result))
        return outputs

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step that was read how long steps take."""
        if self._step_time is not None:
            self._step_time.observe(plan, seconds)

    def take_outputs(self) -> list[CoreOutput]:
        """Final outputs of requests that ended without a step: aborted, timed out."""
        outputs, self._state.early_outputs = self._state.early_outputs, []
        return outputs

    def _expire(self, now: float) -> None:
        for seq, kind in self._timeouts.due(now):
            if not seq.finished:
                self._num_timeouts += 1
                self._state.finish_early(seq, kind)

    def masked_rows(self) -> list[MaskedRow]:
        """Rows of the latest plan that may sample only some tokens."""
        return [row for row in self._masked if not row.allowed.anything]

    def follows_grammar(self, request_id: str) -> bool:
        """Whether the token of a structured request that was read last is one of those that its grammar
        constrains: no part of its thought."""
        seq = self._state.live.get(request_id)
        return seq is not None and (seq.thought is None or seq.thought.in_answer)

    # -- state -----------------------------------------------------------------------------------------------

    @property
    def needs_sync(self) -> bool:
        """A sequence that needs a mask cannot be planned before a step in flight is read; others can."""
        return any(seq.unread and seq.sync for seq in self._state.guided)

    @property
    def wants_to_draft(self) -> bool:
        """Whether a sequence would draft if the steps in flight were read: a caller that overlaps steps reads
        first."""
        state, speculation = self._state, self._speculation
        if not speculation.few_enough(len(state.decoding)):
            return False
        return any(seq.unread and (seq.drafted or speculation.eager(seq)) for seq in state.decoding)

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not read."""
        return len(self._flights)

    def has_work(self) -> bool:
        """Some request is unfinished, or a final output waits to be taken."""
        return bool(self._state.live or self._state.early_outputs)

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes.

        Running sequences keep their blocks. Returns how many hashes were dropped.
        """
        return self.pool.reset()

    def stats(self) -> SchedulerStats:
        """A snapshot; O(unfinished requests)."""
        state, pool = self._state, self.pool
        by_class: dict[str, int] = {}
        queued_tokens = sum(seq.prefill_left for seq in state.prefilling)
        for seq in state.live.values():
            if seq.state is not State.RUNNING:
                by_class[seq.priority_class] = by_class.get(seq.priority_class, 0) + 1
                queued_tokens += len(seq.token_ids)
        return SchedulerStats(
            running=len(state.prefilling) + len(state.decoding),
            prefilling=len(state.prefilling),
            waiting=state.num_waiting + len(state.draining),
            waiting_by_class=by_class,
            parked=state.dedup.num_parked,
            queued_prefill_tokens=queued_tokens,
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_used=pool.num_used,
            blocks_cached=pool.num_cached,
            steps_in_flight=len(self._flights),
            steps_total=self._next_step_id,
            requests_total=self._next_seq_id,
            preemptions_total=state.num_preemptions,
            prefix_query_tokens_total=self._prefill.query_tokens,
            prefix_hit_tokens_total=self._prefill.hit_tokens,
            generated_tokens_total=self._results.generated_tokens,
            timeouts_total=self._num_timeouts,
            drafted_tokens_total=self._speculation.drafted_tokens,
            accepted_tokens_total=self._speculation.accepted_tokens,
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError if any invariant of scheduler and pool is broken.

        O(blocks + requests); for tests.
        """
        state = self._state
        running = [*state.prefilling, *state.decoding]
        self.pool.check_integrity([seq.blocks for seq in running])
        by_state = {kind: {seq for seq in state.live.values() if seq.state is kind} for kind in State}

        def need(ok: bool, what: str) -> None:
            if not ok:
                raise IntegrityError(what)

        need(set(running) == by_state[State.RUNNING], "the running sets differ from the sequences' states")
        need(
            set(state.draining) == by_state[State.DRAINING],
            "the draining set differs from the sequences' states",
        )
        need(state.num_waiting == len(by_state[State.WAITING]), "the count of waiting sequences is wrong")
        queued = sum(state.policy.waiting().values())
        held = sum(seq.held for seq in state.live.values())
        need(
            queued + state.dedup.num_parked + held == state.num_waiting,
            "a waiting sequence is in no queue, or in two",
        )
        slots = sorted([seq.slot for seq in running] + state.free_slots)
        need(slots == list(range(self.config.max_concurrent_requests)), "slots are lost or doubled")
        unread = sum(seq.unread for seq in state.live.values())
        sampled = sum(not seq.finished for flight in self._flights for seq in flight.sampled)
        need(unread == sampled, "unread tokens differ from sampled rows in flight")
        for seq in state.decoding:
            need(seq.computed == len(seq.token_ids) + seq.unread - 1, f"{seq.request_id}: positions are off")
            need(seq.computed <= seq.capacity, f"{seq.request_id}: computed more than its blocks hold")
        need(
            bool(state.prefilling) or state.dedup.is_idle, "a hash is owned though nothing is being prefilled"
        )
