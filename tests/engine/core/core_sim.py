"""A runner that models what KV *means*, and a loop around the scheduler with any number of steps in flight.

Each (block, offset) of the simulated cache holds a digest of the whole token prefix whose KV stands there. A
row that reads a position holding anything but the KV of its own prefix fails the test at once. The next token
is a function of the prefix alone, so the right output of a request is known without running anything
(`expected`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field

from leadline.engine.core import BlockPool, Scheduler, SchedulerConfig, WeightedPolicy
from leadline.engine.core.plan import NewSeq, SampledLogprobs, StepPlan, StepResult, StepRow
from leadline.engine.core.sequence import ANYTHING, Allowed, Thought
from leadline.engine.messages import CoreOutput, CoreRequest
from leadline.engine.sampling_params import SamplingParams, StructuredSpec

VOCAB = 40
EOS = 0
GRAMMAR_END = 20
WEIGHTS = {"interactive": 4.0, "batch": 1.0}


def fold(state: int, token: int) -> int:
    """Digest of a prefix from that of the prefix one token shorter."""
    return ((state ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & (2**64 - 1)


def digests(tokens: list[int], seed: int) -> list[int]:
    out, state = [], seed
    for token in tokens:
        state = fold(state, token)
        out.append(state)
    return out


def sample(digest: int, banned: Container[int] = (), allowed: Allowed = ANYTHING) -> int:
    while True:
        token = (digest >> 33) % VOCAB
        if token not in banned and may_follow(token, allowed):
            return token
        digest = fold(digest, 12345)


def may_follow(token: int, allowed: Allowed) -> bool:
    """The grammar of all structured requests allows the first tokens of the vocabulary."""
    return allowed.anything or token in allowed.tokens or (allowed.grammar and token < GRAMMAR_END)


def request(
    request_id: str, prompt: list[int], *, salt: int = 0, structured: bool = False, **changes
) -> CoreRequest:
    """A request for tests: SamplingParams' fields and CoreRequest's by keyword.

    The salt doubles as the seed, which roots the simulated digests: a block shared across salts is noticed.
    """
    own = {name: changes.pop(name) for name in list(changes) if name in CoreRequest.__struct_fields__}
    changes.setdefault("max_tokens", 16)
    if structured:
        changes["structured"] = StructuredSpec(kind="json_object")
    return CoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**changes),
        seed=salt,
        cache_salt=str(salt),
        **{"arrival": 0.0, **own},
    )


def expected(req: CoreRequest, limit: int) -> tuple[list[int], str]:
    """Output tokens and finish reason of `req`, where no sequence may exceed `limit` tokens."""
    tokens, sampling = list(req.prompt_token_ids), req.sampling
    original = len(tokens) - req.num_resumed
    limit = min(limit, original + sampling.max_tokens)
    stops = (*req.eos_token_ids, *sampling.stop_token_ids)
    state = digests(tokens, req.seed)[-1]
    structured = sampling.structured is not None
    thought = None if req.thought is None else Thought(req.thought, structured=structured)
    for token in tokens[original:] if thought is not None else ():
        thought.take(token)
    while True:
        banned = stops if len(tokens) < original + sampling.min_tokens else ()
        banned = [stop for stop in banned if req.thought is None or stop not in req.thought.closing]
        allowed = thought.allowed if thought is not None else Allowed(grammar=structured)
        token = sample(state, banned, allowed)
        tokens.append(token)
        if thought is not None:
            thought.take(token)
        state = fold(state, token)
        if token in stops and len(tokens) > original + sampling.min_tokens:
            return tokens[len(req.prompt_token_ids) :], "stop"
        if len(tokens) == limit:
            return tokens[len(req.prompt_token_ids) :], "length"


@dataclass
class Slot:
    new: NewSeq
    table: list[int]
    tokens: list[int]
    digests: list[int]
    computed: int = -1

    @property
    def new_length(self) -> int:
        return len(self.new.token_ids)


@dataclass
class SimRunner:
    """Executes plans in order and checks everything the plan's contract promises."""

    config: SchedulerConfig
    num_blocks: int
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    slots: dict[int, Slot] = field(default_factory=dict)
    computed_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    dropped: int = 0
    """Sampled tokens that were computed again."""
    rows_log: list[list[tuple[int, int, int, bool]]] = field(default_factory=list)
    """Per step: (seq_id, start, count, sample)."""

    def execute(self, plan: StepPlan) -> StepResult:
        size = self.config.block_size
        for slot in plan.released:
            del self.slots[slot]
        for new in plan.entered:
            assert new.slot not in self.slots, "a slot is entered while taken"
            assert 0 <= new.slot < self.config.max_concurrent_requests
            assert len(new.block_ids) * size >= len(new.token_ids)
            tokens = list(new.token_ids)
            self.slots[new.slot] = Slot(new, list(new.block_ids), tokens, digests(tokens, new.seed))
        for slot, blocks in plan.grown:
            self.slots[slot].table.extend(blocks)
            self._forget(blocks)
        for row in plan.rows:
            if self.slots[row.slot].computed < 0:  # its first row: blocks before it are hits, the others new
                assert row.start % size == 0
                self._forget(self.slots[row.slot].table[row.start // size :])
        assert plan.rows, "an empty plan"
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        counts = [row.count for row in plan.rows]
        ones = counts.count(1)
        assert all(count == 1 for count in counts[:ones]), "rows with one token come first"
        assert min(counts) >= 1
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "a slot has two rows"
        self._write(plan)
        self._read(plan)
        self.computed_tokens += plan.num_tokens
        self.rows_log.append(
            [(self.slots[row.slot].new.seq_id, row.start, row.count, row.sample) for row in plan.rows]
        )
        return self._sample(plan)

    def _forget(self, blocks: list[int]) -> None:
        for block in blocks:
            for offset in range(self.config.block_size):
                self.memory.pop((block, offset), None)

    def _write(self, plan: StepPlan) -> None:
        size = self.config.block_size
        owners: dict[int, int] = {}
        for slot in self.slots.values():
            for block in slot.table:
                assert 0 <= block < self.num_blocks
                owners[block] = owners.get(block, 0) + 1
        for row in plan.rows:
            slot = self.slots[row.slot]
            end = row.start + row.count
            held = slot.digests
            if row.tokens is not None:
                if slot.computed > row.start:  # tokens sampled behind this one were dropped
                    self.dropped += slot.computed - row.start
                    slot.computed = row.start
                    del slot.tokens[row.start + 1 :], slot.digests[row.start + 1 :]
                assert slot.tokens[row.start :] == row.tokens[:1], "a row brings another token than the last"
                held = [*slot.digests[: row.start], *self._along(slot, row)]
                self.drafted += row.count - 1
            else:
                assert end <= len(slot.tokens), "a row's input token does not exist yet"
                assert row.count == 1 or not row.sample or end == slot.new_length, (
                    "a chunk past what is known"
                )
            if slot.computed >= 0:
                assert row.start == slot.computed, "positions are skipped or repeated"
            slot.computed = end
            for position in range(row.start, end):
                block = slot.table[position // size]
                # A block may be hit in the plan that fills it; what a shared block holds is not rewritten.
                where, digest = (block, position % size), held[position]
                assert owners[block] == 1 or self.memory.get(where) != digest, "a shared block is rewritten"
                self.memory[where] = digest

    def _read(self, plan: StepPlan) -> None:
        size = self.config.block_size
        for row in plan.rows:
            slot = self.slots[row.slot]
            for position in range(row.start + (row.count if row.tokens is None else 1)):
                held = self.memory.get((slot.table[position // size], position % size))
                assert held == slot.digests[position], f"position {position} holds another prefix's KV"

    def _sample(self, plan: StepPlan) -> StepResult:
        result = StepResult(plan.step_id, [], [])
        for row in plan.rows:
            slot = self.slots[row.slot]
            new, end = slot.new, row.start + row.count
            if row.prompt_logprobs:
                result.prompt_logprobs[row.slot] = [
                    SampledLogprobs(slot.tokens[p], -(slot.digests[p - 1] % 1000) / 100, 1)
                    for p in range(row.start + 1, min(end + 1, len(new.token_ids)))
                ]
            if not row.sample:
                assert end < len(slot.tokens)
                continue
            assert row.tokens is not None or end == len(slot.tokens), (
                "a sampling row must end at the last token"
            )
            right = True
            for i, digest in enumerate(self._along(slot, row)[-row.num_samples :]):
                position = end - row.num_samples + i + 1
                below = position < new.prompt_len + new.sampling.min_tokens
                allowed = plan.masks.get(row.slot, ANYTHING)
                token = sample(digest, new.banned_until_min if below else (), allowed)
                result.tokens.append(token)
                wanted = new.sampling.logprobs is not None
                result.logprobs.append(SampledLogprobs(token, -0.5, 1) if wanted else None)
                if right:
                    slot.digests.append(fold(slot.digests[-1], token))
                    slot.tokens.append(token)
                    slot.computed = position
                    self.accepted += i > 0
                right = right and i + 1 < row.num_samples and row.tokens[i + 1] == token
        return result

    @staticmethod
    def _along(slot: Slot, row: StepRow) -> list[int]:
        """Digest after each query token of the row, drafted ones followed as if they were true."""
        if row.tokens is None:
            return slot.digests[row.start : row.start + row.count]
        out = [slot.digests[row.start]]
        for token in row.tokens[1:]:
            out.append(fold(out[-1], token))
        return out


class Loop:
    """Scheduler and simulated runner with up to `depth` steps unread when the next is scheduled."""

    def __init__(
        self, num_blocks: int, *, depth: int = 0, eviction=None, policy=None, make_drafter=None, **settings
    ) -> None:
        settings = {"block_size": 4, "max_model_len": 400, "max_num_batched_tokens": 64, **settings}
        settings.setdefault("max_concurrent_requests", 8)
        self.config = SchedulerConfig(**settings)
        self.pool = BlockPool(num_blocks, eviction)
        self.scheduler = Scheduler(
            self.config, self.pool, policy or WeightedPolicy(WEIGHTS), make_drafter=make_drafter
        )
        self.runner = SimRunner(self.config, num_blocks)
        self.depth = depth
        self.now = 0.0
        self.flights: deque[StepPlan] = deque()
        self.requests: dict[str, CoreRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.outputs: dict[str, list[CoreOutput]] = {}
        self.final: dict[str, CoreOutput] = {}

    def add(self, req: CoreRequest, *, held: bool = False) -> CoreRequest:
        self.scheduler.add(req, self.now, held=held)
        self.requests[req.request_id] = req
        self.tokens[req.request_id] = []
        self.outputs[req.request_id] = []
        return req

    def abort(self, request_id: str) -> None:
        assert self.scheduler.abort(request_id)
        self._take(self.scheduler.take_outputs())
        assert self.final[request_id].finish_reason == "abort"

    def step(self) -> StepPlan | None:
        """Schedule once; read results until at most `depth` steps are unread (all, if there was no plan).

        Like the engine, it reads first where a sequence would draft.
        """
        while self.flights and self.scheduler.wants_to_draft:
            self.read()
        plan = self.scheduler.schedule(self.now)
        self._take(self.scheduler.take_outputs())
        if plan is not None:
            self._mask(plan)
            self.flights.append(plan)
        while len(self.flights) > (self.depth if plan is not None else 0):
            self.read()
        self.scheduler.check_integrity()
        return plan

    def read(self) -> None:
        oldest = self.flights.popleft()
        self._take(self.scheduler.update(oldest, self.runner.execute(oldest), self.now))

    def _mask(self, plan: StepPlan) -> None:
        sampled = {row.slot: row for row in plan.rows if row.sample}
        for masked in self.scheduler.masked_rows():
            name = masked.request_id
            known = len(self.requests[name].prompt_token_ids) + len(self.tokens[name])
            row = sampled[masked.slot]
            assert row.start + row.count == known, "a mask is needed while a token is unread"
            plan.masks[masked.slot] = masked.allowed

    def _take(self, outputs: list[CoreOutput]) -> None:
        for output in outputs:
            name = output.request_id
            assert name not in self.final, f"{name} has an output after its final one"
            self.outputs[name].append(output)
            self.tokens[name].extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.final[name] = output

    def run(self, max_steps: int = 5000) -> None:
        """Step until nothing is left, then check that nothing is left behind."""
        for _ in range(max_steps):
            if not self.scheduler.has_work() and not self.flights:
                break
            if self.step() is None:
                assert not self.flights
        else:
            raise AssertionError(f"not done after {max_steps} steps: {self.scheduler.stats()}")
        self.check_idle()

    def check_idle(self) -> None:
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.parked, stats.queued_prefill_tokens) == (0, 0, 0, 0)
        assert stats.blocks_used == 0
        assert stats.steps_in_flight == 0
        assert set(self.final) == set(self.requests)
        self.scheduler.check_integrity()

    @property
    def limit(self) -> int:
        """Tokens no sequence exceeds."""
        return min(self.config.max_model_len, self.pool.num_blocks * self.config.block_size + 1)

    def check_exact(self) -> None:
        """Every finished request has exactly the tokens it would have alone with an endless pool."""
        for name, output in self.final.items():
            tokens, reason = expected(self.requests[name], self.limit)
            if output.finish_reason in ("stop", "length"):
                assert (self.tokens[name], output.finish_reason) == (tokens, reason), name
            else:
                assert self.tokens[name] == tokens[: len(self.tokens[name])], name
