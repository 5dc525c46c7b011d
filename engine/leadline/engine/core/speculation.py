"""Speculative decoding as the scheduler sees it: which sequences draft, how much, and when it does not pay.

A drafting row computes the last known token and the drafted ones in one step, samples at each of them, and
keeps what the sequence would have got one by one:

    query tokens   t  | d1  d2  d3        t known, d drafted
    sampled        s1 | s2  s3  s4        s(i+1) counts if d1 .. di = s1 .. si
    kept           with d1 = s1 and d2 != s2:  s1 s2

Exact by construction: a token sampled at a position is a function of the tokens before it and of the
position's own noise (sampling/noise.py), so greedy and sampled output are the same with and
without drafting. What reads the output or moves a grammar on does depend on the order of steps:
penalties, bad words of several tokens and structured output do not draft.

A drafting sequence must be known up to its last token, so while any sequence would draft, nothing is planned
over an unread step. Failures make a sequence wait, twice as long each time: text that copies nothing costs
next to nothing, and its steps overlap as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as TokenSequence

from leadline.engine.core.drafter import Drafter, NgramIndex
from leadline.engine.core.sequence import Sequence
from leadline.engine.core.settings import SchedulerConfig
from leadline.engine.messages import CoreRequest

__all__ = ["Speculation", "accepted"]

_FIRST_PAUSE = 4
_LONGEST_PAUSE = 64


class Speculation:
    """Decides about drafts; counts them.

    `make_drafter` gives each sequence its own; None: prompt lookup.
    """

    def __init__(
        self, config: SchedulerConfig, make_drafter: Callable[[CoreRequest], Drafter] | None = None
    ) -> None:
        self._most = config.speculative_ngram
        self._match = config.speculative_match
        self._rows = config.speculative_max_batch
        self._make_drafter = make_drafter or (lambda _: NgramIndex(self._match))
        self.drafted_tokens = 0
        self.accepted_tokens = 0

    def allowed(self, request: CoreRequest) -> bool:
        """Whether the request's tokens do not depend on how many a step brings."""
        sampling = request.sampling
        return self._most > 0 and sampling.structured is None and not sampling.reads_output

    def few_enough(self, decoding: int) -> bool:
        """Whether drafts pay among so many decoding sequences: beyond that, rows cost what they bring."""
        return 0 < decoding <= self._rows

    @staticmethod
    def eager(seq: Sequence) -> bool:
        """Whether `seq` would look for a draft, were all of its tokens known."""
        return seq.may_draft and len(seq.token_ids) + seq.unread >= seq.draft_from

    def draft(self, seq: Sequence, limit: int) -> list[int]:
        """What may follow `seq`, all of whose tokens are known; at most `limit` tokens."""
        if not self.eager(seq):
            return []
        if seq.drafter is None:
            seq.drafter = self._make_drafter(seq.request)
        draft = seq.drafter.propose(seq.token_ids, min(self._most, limit))
        if not draft and limit > 0:
            self._pause(seq)
        return draft

    def learn(self, seq: Sequence, drafted: int, kept: int) -> None:
        """A step has shown that `kept` of `drafted` tokens were right."""
        self.drafted_tokens += drafted
        self.accepted_tokens += kept
        if kept:
            seq.draft_pause = 0
        else:
            self._pause(seq)

    @staticmethod
    def _pause(seq: Sequence) -> None:
        seq.draft_pause = min(_LONGEST_PAUSE, 2 * seq.draft_pause or _FIRST_PAUSE)
        seq.draft_from = len(seq.token_ids) + seq.draft_pause


def accepted(draft: TokenSequence[int], sampled: TokenSequence[int]) -> int:
    """How many drafted tokens are what was sampled at their place; sampled[i] belongs where draft[i]
    stands, and one more follows."""
    for count, (token, wanted) in enumerate(zip(draft, sampled, strict=False)):
        if token != wanted:
            return count
    return len(draft)
