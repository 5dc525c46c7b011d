"""Stop strings over a stream of text.

Owns the tail of the text that could still become a stop string. Each stop string is followed by the automaton
of Knuth, Morris and Pratt (SIAM J. Comput. 6, 1977): its state is the length of the longest prefix of the
stop string that the text seen so far ends with. So the text that must be held back is exactly the largest
state, the cost is O(1) amortised per character and stop string, and the result does not depend on how the
text was cut into pieces.

    stop "DEFG"    text  A B C D E X D E
    state                0 0 0 1 2 0 1 2      after the last character "DE" is held back, "ABCDEX" is out

The stop string that is complete first wins; of several that end at the same character, the longest.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Looks for `stops` in the text of one sequence, once; after a hit nothing more is pushed.

    With `include` the stop string is part of the text given out, otherwise the text ends before it.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = [(stop, _failure(stop)) for stop in dict.fromkeys(stops)]
        self._states = [0] * len(self._stops)
        self._include = include
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Add text; return (text that is final, the stop string found or None).

        While not `armed` (min_tokens not reached), stop strings that become complete are ignored; one that
        began then and becomes complete later counts.
        """
        if not self._stops:
            return text, None
        held = len(self._held)
        whole = self._held + text
        for position, char in enumerate(text, start=held + 1):
            found = self._step(char)
            if found is not None and armed:
                self._held = ""
                return whole[: position if self._include else position - len(found)], found
        keep = max(self._states)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], None

    def flush(self) -> str:
        """The sequence ended otherwise: return what was held back."""
        text, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return text

    def _step(self, char: str) -> str | None:
        """Advance every automaton by one character; return the longest stop string that is complete now."""
        found: str | None = None
        for i, (stop, failure) in enumerate(self._stops):
            state = self._states[i]
            while state and stop[state] != char:
                state = failure[state]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                if found is None or len(stop) > len(found):
                    found = stop
                # Fall back to a proper prefix, which keeps `state < len(stop)` and so `stop[state]` valid.
                state = failure[state]
            self._states[i] = state
        return found


def _failure(stop: str) -> list[int]:
    """failure[k]: length of the longest proper prefix of stop[:k] that is also its suffix."""
    failure = [0] * (len(stop) + 1)
    state = 0
    for k in range(1, len(stop)):
        while state and stop[state] != stop[k]:
            state = failure[state]
        if stop[state] == stop[k]:
            state += 1
        failure[k + 1] = state
    return failure
