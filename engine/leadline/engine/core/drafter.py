"""Drafts for speculation: the contract, and prompt lookup, which drafts out of the sequence's own tokens
(Saxena 2023; no model involved).

Text that copies (an answer that quotes its prompt, code that is edited, a list that repeats) goes on as it
went on the last time that its latest tokens stood there:

    tokens   ... a b c d e f ... x b c          the latest `match` tokens, here 2, are b c
                   `-' `-------------'
                   found   drafted: d e f ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Drafter", "NgramIndex"]

_CANDIDATES = 8
"""Latest occurrences that are compared."""
_LOOK_BACK = 32
"""Tokens over which they are compared."""


class Drafter(Protocol):
    """Proposes what may follow one sequence."""

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Return at most `limit` tokens to follow `tokens`, which are those of the last call and more."""


class NgramIndex:
    """Where each run of `match` tokens of one sequence stands; grows with it, a dictionary entry a token."""

    def __init__(self, match: int) -> None:
        self._match = match
        self._ends: dict[tuple[int, ...], list[int]] = {}
        """Run → positions after its latest occurrences, ascending; the sequence's last run is not in yet."""
        self._seen = match
        """Runs that end before this position are indexed."""

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """At most `limit` tokens that may follow `tokens`; none if their last run stands nowhere else.

        `tokens` are those of the last call and more. Of several occurrences the one that agrees furthest back
        decides, of equals the latest. A draft that reaches the end of the sequence goes on into itself: the
        text is taken to have the period at which it repeats.
        """
        match, ends = self._match, self._ends
        length = len(tokens)
        for end in range(self._seen, length):
            places = ends.setdefault(tuple(tokens[end - match : end]), [])
            places.append(end)
            if len(places) > _CANDIDATES:
                del places[0]
        self._seen = max(self._seen, length)
        if limit < 1 or length < match:
            return []
        best, longest = 0, 0
        for end in reversed(ends.get(tuple(tokens[length - match :]), ())):
            agreed = self._agreement(tokens, end)
            if agreed > longest:
                best, longest = end, agreed
        if not best:
            return []
        draft = list(tokens[best : best + limit])
        while len(draft) < limit:
            draft.append(draft[len(draft) - (length - best)])
        return draft

    def _agreement(self, tokens: Sequence[int], end: int) -> int:
        """Tokens before `end` that equal those before the sequence's end."""
        length, agreed = len(tokens), self._match
        while agreed < min(_LOOK_BACK, end) and tokens[end - agreed - 1] == tokens[length - agreed - 1]:
            agreed += 1
        return agreed
