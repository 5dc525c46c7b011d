"""What pods will hold soon: blocks of requests that were routed and whose cache events have not arrived yet.

Owns guesses only. They bridge the time from routing a request to the pod's own event
(the prefill of the prompt and one trip through Redis), so that the second turn of a conversation, or the
second of two requests with one prefix, finds the pod that the first went to.

A guess is (block hash, pod, time it expires at). A hash names a whole prefix, so a guess that a pod
will hold block i includes all blocks before it. So the deepest guessed block of a chain gives the pod's
depth, even after guesses in front of it were confirmed and removed.

Invariants: one guess for each (hash, pod), the latest; entries leave by the pod's `stored` or `removed`
event, by its epoch ending, or by expiring, whichever is first; at most `max_entries`, the oldest leave first.

Plain dicts, about 290 bytes a guess: a routed request adds only the blocks its pod was not known to hold.
"""

from collections import deque
from collections.abc import Iterable, Sequence

__all__ = ["SpeculativeIndex"]


class SpeculativeIndex:
    """hash → pods that were sent it less than `ttl` seconds ago. Times are the caller's, monotonic."""

    __slots__ = ("_expiry", "_guesses", "_size", "max_entries", "ttl")

    def __init__(self, ttl: float = 5.0, max_entries: int = 250_000) -> None:
        if ttl <= 0 or max_entries < 1:
            raise ValueError(f"ttl and max_entries must be positive, not {ttl} and {max_entries}")
        self.ttl = ttl
        self.max_entries = max_entries
        self._guesses: dict[int, dict[str, float]] = {}
        self._expiry: deque[tuple[float, str, Sequence[int]]] = deque()
        self._size = 0

    def restart(self, ttl: float) -> None:
        """All guesses so far are over; from now on they live `ttl` seconds."""
        self.ttl = ttl
        self._guesses.clear()
        self._expiry.clear()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, pod: str, hashes: Sequence[int], now: float) -> None:
        """A request whose chain ends with these blocks went to the pod."""
        self.expire(now)
        hashes = hashes[: self.max_entries]
        if not hashes:
            return
        until = now + self.ttl
        guesses = self._guesses
        for block in hashes:
            pods = guesses.setdefault(block, {})
            self._size += pod not in pods
            pods[pod] = until
        self._expiry.append((until, pod, hashes))
        while self._size > self.max_entries:
            self._forget_oldest()

    def match(self, hashes: Sequence[int], now: float) -> dict[str, int]:
        """Leading blocks of the chain each pod will hold, by guesses alone. Pods without one are left out."""
        guesses = self._guesses
        if not guesses:
            return {}
        depths: dict[str, int] = {}
        for position in range(len(hashes) - 1, -1, -1):
            pods = guesses.get(hashes[position])
            if pods:
                for pod, until in pods.items():
                    if until > now and pod not in depths:
                        depths[pod] = position + 1
        return depths

    def settle(self, pod: str, hashes: Iterable[int]) -> None:
        """The pod's own events have spoken of these blocks: the guesses about them are over."""
        guesses = self._guesses
        if not guesses:
            return
        for block in hashes:
            pods = guesses.get(block)
            if pods is not None and pods.pop(pod, None) is not None:
                self._size -= 1
                if not pods:
                    del guesses[block]

    def drop(self, pod: str) -> None:
        """All guesses about the pod are over: it is gone, restarted or has cleared its cache."""
        for _, owner, hashes in self._expiry:
            if owner == pod:
                self.settle(pod, hashes)
        self._expiry = deque(entry for entry in self._expiry if entry[1] != pod)

    def expire(self, now: float) -> None:
        """Forget the guesses that have run out. `add` does it too."""
        while self._expiry and self._expiry[0][0] <= now:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        until, pod, hashes = self._expiry.popleft()
        guesses = self._guesses
        for block in hashes:
            pods = guesses.get(block)
            # A later guess about the same block has a later time, and stays.
            if pods is not None and pods.get(pod) == until:
                del pods[pod]
                self._size -= 1
                if not pods:
                    del guesses[block]
