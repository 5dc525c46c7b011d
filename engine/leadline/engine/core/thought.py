"""A sequence's thought, followed token by token: where it ends, and which tokens may come next.

    inside ──an end──▶ answer            inside, at its budget: the closing tokens are forced, one by one
    maybe ──an opening──▶ inside         maybe, any other token: the answer has begun
    between ──an opening──▶ inside ──an end──▶ between ──the answer's beginning──▶ answer

The state is a function of the tokens alone. So it is the same after preemption, on another pod, and however
many tokens a step brings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from leadline.engine.messages import ThoughtSpec

__all__ = ["ANYTHING", "GRAMMAR", "Allowed", "Thought", "answer_of"]


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
    """Follows one sequence.

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
        self._structured = structured
        self._phase: Literal["inside", "maybe", "between", "answer"] = spec.begins
        self._recent: list[int] = []
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
        elif phase == "maybe":
            if token in self._openings:
                self._phase = "inside"
                self.num_tokens += 1
            else:
                self._phase = "answer"
                self.in_answer = True
        elif self._came(spec.opens):
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
        else:
            self.allowed = ANYTHING


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
