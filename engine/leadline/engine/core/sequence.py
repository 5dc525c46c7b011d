"""One sequence as the scheduler sees it. Nothing here decides anything; the parts of the scheduler move the
fields.

    token_ids     |<-------------- known on the host --------------->|<- unread: sampled, on the device ->|
    computed      |<--- KV computed, or planned to be ------->|
    committed     |<--- full blocks offered to the index -->|
    capacity      |<--- what its blocks can hold ----------------->|

While it decodes, `computed` is always one less than known + unread: the last token's KV is computed by the
row that samples the next one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

from leadline.engine.core.plan import SampledLogprobs
from leadline.engine.messages import CoreRequest, ThoughtSpec

if TYPE_CHECKING:
    from leadline.engine.core.drafter import Drafter

__all__ = ["ANYTHING", "GRAMMAR", "NEVER", "Allowed", "Sequence", "State", "Thought", "answer_of"]


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may come next: the tokens that the grammar allows, if it holds already, and `tokens`."""

    grammar: bool = False
    tokens: tuple[int, ...] = ()

    @property
    def anything(self) -> bool:
        """Whether no mask is needed."""
        return not self.grammar and not self.tokens


ANYTHING = Allowed()
GRAMMAR = Allowed(grammar=True)


class Thought:
    """Follows the thought of one sequence token by token: where it ends, and which tokens may come next.

        inside ──an end──▶ answer            inside, at its budget: the closing tokens are forced, one by one
        maybe ──an opening──▶ inside         maybe, any other token but white space: the answer has begun
        between ──an opening──▶ inside ──an end──▶ between ──the answer's beginning──▶ answer

    The state is a function of the tokens alone. So it is the same after preemption, on another pod, and
    however many tokens a step brings.

    Attributes:
        allowed: what may come next.
        answering: the answer has begun: no thought follows.
        in_answer: the last token belongs to the answer, which a grammar may constrain.
        num_tokens: tokens of thoughts so far, with their tags.
    """

    def __init__(self, spec: ThoughtSpec, *, structured: bool = False) -> None:
        """`structured`: a grammar constrains the answer."""
        self._spec = spec
        self._openings = {one[0] for one in spec.opens if len(one) == 1}
        self._blanks = frozenset(spec.blanks)
        self._structured = structured
        self._phase: Literal["inside", "maybe", "between", "answer"] = spec.begins
        self._recent: list[int] = []
        self._markers = (*spec.opens, *spec.answers)
        self._header: list[int] = []
        """Tokens since the last message, or since the output began."""
        self._longest = max(map(len, (*spec.opens, *spec.ends, *spec.answers)), default=1)
        self._spent = 0
        self._forcing = 0
        """Closing tokens that are still to be forced."""
        self.in_answer = False
        self.num_tokens = 0
        self._settle()

    @property
    def answering(self) -> bool:
        return self._phase == "answer"

    def take(self, token: int) -> None:
        """Take in the next token of the output."""
        spec, phase = self._spec, self._phase
        self.in_answer = False
        # A resumed output may be of a pod with another budget.
        self._forcing = self._forcing - 1 if token in self.allowed.tokens and self._forcing else 0
        if phase == "answer":
            self.in_answer = True
            return
        self._recent = [*self._recent[1 - self._longest :], token] if self._longest > 1 else [token]
        if phase == "inside":
            self._spent += 1
            self.num_tokens += 1
            if self._came(spec.ends):
                self._phase = "between" if spec.answers else "answer"
                self._header = []
                self._markers = tuple((*spec.heading, *marker) for marker in (*spec.opens, *spec.answers))
        elif phase == "maybe" and token in self._blanks and not self._structured:
            pass  # a grammar that allows it makes it part of the answer
        elif phase == "maybe":
            if token in self._openings:
                self._phase = "inside"
                self.num_tokens += 1
            else:
                self._phase = "answer"
                self.in_answer = True
        else:
            self._header.append(token)
            if self._came(spec.opens):
                self._phase = "inside"
            elif self._came(spec.answers):
                self._phase = "answer"
        self._settle()

    def _came(self, markers: tuple[tuple[int, ...], ...]) -> bool:
        return any(tuple(self._recent[-len(marker) :]) == marker for marker in markers)

    def _settle(self) -> None:
        """Work out what may come next."""
        spec = self._spec
        if self._phase == "answer":
            self._forcing = 0
        elif self._phase == "inside" and not self._forcing and spec.budget is not None:
            self._forcing = len(spec.closing) if self._spent >= spec.budget else 0
        if self._forcing:
            self.allowed = Allowed(tokens=spec.closing[len(spec.closing) - self._forcing :][:1])
        elif self._phase == "answer":
            self.allowed = GRAMMAR if self._structured else ANYTHING
        elif self._phase == "maybe" and self._structured:
            self.allowed = Allowed(grammar=True, tokens=tuple(self._openings))
        elif self._phase == "between" and self._structured and spec.heading:
            self.allowed = self._next_of_header()
        else:
            self.allowed = ANYTHING

    def _next_of_header(self) -> Allowed:
        """Where the answer must have a form, no message may come that is neither a thought nor the answer."""
        header, done = tuple(self._header), len(self._header)
        begun = [marker for marker in self._markers if marker[:done] == header and len(marker) > done]
        return Allowed(tokens=tuple(dict.fromkeys(marker[done] for marker in begun)))


def answer_of(spec: ThoughtSpec | None, tokens: Iterable[int]) -> list[int]:
    """Those of an output's tokens that a grammar for the answer has to follow."""
    if spec is None:
        return list(tokens)
    thought, answer = Thought(spec), []
    for token in tokens:
        thought.take(token)
        if thought.in_answer:
            answer.append(token)
    return answer


NEVER = 1 << 62
"""A position no sequence reaches."""


class State(Enum):
    WAITING = "waiting"
    """In the policy's queue, or parked until another sequence has computed a block it needs."""
    RUNNING = "running"
    """Owns a slot and blocks."""
    DRAINING = "draining"
    """Preempted with sampled tokens still unread; queues again once they are read."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sequence, from `add` to its last output."""

    seq_id: int
    """Also the order of arrival."""
    request: CoreRequest
    request_id: str
    priority_class: str
    token_ids: list[int]
    """Prompt and sampled tokens known on the host."""
    prompt_len: int
    """Tokens of the prompt, without those that an earlier attempt generated (num_resumed)."""
    max_len: int
    """It finishes with `length` when this many tokens exist."""
    stop_ids: frozenset[int]
    min_len: int
    """A stop id counts only beyond this many tokens."""
    root: bytes
    """Hash its chain starts from; unused without prefix caching."""

    state: State = State.WAITING
    finished: bool = False
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    capacity: int = 0
    """len(blocks) * block_size"""
    computed: int = 0
    last_start: int = 0
    """No row starts here or later: max_len - 1."""
    unread: int = 0
    """Sampled tokens planned but not yet seen by `update`."""
    sync: bool = False
    """No sampling row while a token is unread: its mask depends on it."""
    structured: bool = False
    """A grammar constrains the output, or the part of it behind the thought."""
    thought: Thought | None = None
    """State of the thought; None once neither a budget nor a grammar depends on it."""
    reads_output: bool = False
    """The sampler reads sampled tokens (penalties, bad words), so that no sampled token can be dropped."""
    num_dropped: int = 0
    """Of the unread tokens: they were sampled without the mask that they needed, and do not count."""
    rewound: bool = False
    """The device's last token is a dropped one: the next row brings its own."""

    held: bool = False
    """In no queue, until its grammar is there (`Scheduler.unblock`)."""
    blocked: bool = False
    """The mask for its next token is not there yet: no sampling row."""

    may_draft: bool = False
    """Its tokens may be speculated on (core/speculation.py)."""
    drafter: Drafter | None = None
    drafted: list[int] = field(default_factory=list)
    """Drafted tokens of the row in flight: no other row is planned before it is read. `computed` does not
    count them."""
    draft_from: int = 0
    """No draft before so many tokens exist."""
    draft_pause: int = 0

    hashes: list[bytes] = field(default_factory=list)
    committed: int = 0
    commit_at: int = NEVER
    """Token count at which block number `committed` is full; NEVER without prefix caching."""

    waiting_for: bytes | None = None
    """Hash of the block it is parked on."""
    admitted_at: float | None = None
    cached_tokens: int = 0
    """Prefix hit at first admission."""
    preemptions: int = 0
    attempt: int = 0
    """Prefills given up half-way."""
    answered: bool = False
    """Its first output, which carries queue time and cached tokens, is out."""
    wants_logprobs: bool = False
    wants_prompt_logprobs: bool = False
    """Until the first output has carried them.

    It reads nothing from the prefix cache as long as this is set.
    """
    prompt_logprobs: list[SampledLogprobs] = field(default_factory=list)

    def follow_thought(self) -> None:
        """Adapt to what `thought` allows next."""
        thought = self.thought
        if thought is not None:
            if thought.answering and not self.structured:
                self.thought = None
            self.sync = not thought.allowed.anything or (self.reads_output and not thought.answering)

    @property
    def prefill_left(self) -> int:
        """Known tokens whose KV is not planned yet."""
        return len(self.token_ids) - self.computed
