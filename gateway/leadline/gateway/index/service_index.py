"""What the gateway knows about the caches of one service: real blocks, guesses, stream position, age.

The one class the rest of the gateway talks to:

    reader of Redis ──► heard(), pod_seen(), batch(), load_snapshot()      routing ──► match(), routed()
                        asks reloads()                                     metrics ──► stats()

Owns no I/O and no clock: times are monotonic seconds given by the caller. Not safe for threads; it lives on
one event loop. When nothing was read for `stale_after` seconds (Redis is down), `match` answers only with the
blocks that this gateway itself routed recently; routing continues by load.
"""

from collections.abc import Generator, Iterator, Sequence

from leadline.gateway.index.prefix_index import Hashes, IndexStats, PrefixIndex
from leadline.gateway.index.speculative import SpeculativeIndex
from leadline.gateway.index.stream import EventStream, Outcome
from leadline.protocol.events import CacheSnapshot, EventBatch

__all__ = ["ServiceIndex"]


class ServiceIndex:
    """Prefix index, speculative index and event stream of one service."""

    __slots__ = ("_events", "_heard_at", "_real", "_speculative", "stale_after")

    def __init__(
        self, *, speculative_ttl: float = 5.0, stale_after: float = 60.0, seed: int | None = None
    ) -> None:
        self._real = PrefixIndex(seed)
        self._speculative = SpeculativeIndex(speculative_ttl)
        self._events = EventStream(_Sink(self._real, self._speculative))
        self._heard_at = float("-inf")
        self.stale_after = stale_after

    # Routing

    def match(self, hashes: Sequence[int], now: float) -> dict[str, int]:
        """Leading blocks of the chain that each pod holds or is about to. Pods with none are left out."""
        if not hashes:
            return {}
        depths = self._real.match(hashes) if self.fresh(now) else {}
        for pod, depth in self._speculative.match(hashes, now).items():
            if depth > depths.get(pod, 0):
                depths[pod] = depth
        return depths

    def routed(self, pod: str, hashes: Sequence[int], held: int, now: float) -> None:
        """A request with this chain went to the pod, which held its first `held` blocks (from `match`).

        Without cache events (another engine, approximate hashes) give `held=0`, which renews all guesses, and
        make the index with a `speculative_ttl` of minutes.
        """
        self._speculative.add(pod, hashes[held:], now)

    def guess_for(self, seconds: float) -> None:
        """Chains have other names from now on (other tokens, or text): the guesses so far are over, and new
        ones live so long. What pods said themselves stays."""
        self._speculative.restart(seconds)

    # The reader of events

    def heard(self, now: float) -> None:
        """A read from Redis worked, whether or not there was anything to read."""
        self._heard_at = max(self._heard_at, now)

    def fresh(self, now: float) -> bool:
        """Whether what is known is young enough to route by."""
        return now - self._heard_at <= self.stale_after

    def pod_seen(self, pod: str, epoch: str) -> bool:
        """See EventStream.pod_seen."""
        return self._events.pod_seen(pod, epoch)

    def pod_gone(self, pod: str) -> None:
        """See EventStream.pod_gone."""
        self._events.pod_gone(pod)

    def batch(self, batch: EventBatch) -> Outcome:
        """See EventStream.batch."""
        return self._events.batch(batch)

    def snapshot(self, pod: str, snapshot: CacheSnapshot) -> Outcome:
        """See EventStream.snapshot; for event loops, `load_snapshot` is kinder."""
        return self._events.snapshot(pod, snapshot)

    def load_snapshot(self, pod: str, snapshot: CacheSnapshot) -> Generator[None, None, Outcome]:
        """See EventStream.load_snapshot."""
        return self._events.load_snapshot(pod, snapshot)

    def reloads(self) -> list[str]:
        """See EventStream.reloads."""
        return self._events.reloads()

    def expect(self, pod: str, epoch: str, seq: int) -> bool:
        """See EventStream.expect."""
        return self._events.expect(pod, epoch, seq)

    def in_step(self, pod: str) -> bool:
        """See EventStream.in_step."""
        return self._events.in_step(pod)

    def distrust(self) -> None:
        """See EventStream.distrust."""
        self._events.distrust()

    def maintain(self, now: float) -> bool:
        """Housekeeping of about a millisecond, for idle moments. Returns whether there is more to do."""
        self._speculative.expire(now)
        return self._real.sweep()

    # Metrics

    def stats(self) -> IndexStats:
        return self._real.stats()

    @property
    def speculative_entries(self) -> int:
        return len(self._speculative)

    @property
    def gaps(self) -> int:
        """Times a pod's events had a gap."""
        return self._events.gaps


class _Sink:
    """Real blocks go to the prefix index; an event about a block ends the guesses about it."""

    __slots__ = ("_real", "_speculative")

    def __init__(self, real: PrefixIndex, speculative: SpeculativeIndex) -> None:
        self._real = real
        self._speculative = speculative

    def load_pod(self, pod: str, epoch: str, hashes: Hashes) -> Iterator[None]:
        if self._real.pods().get(pod) != epoch:
            self._speculative.drop(pod)
        return self._real.load_pod(pod, epoch, hashes)

    def store(self, pod: str, epoch: str, hashes: Hashes) -> int:
        self._speculative.settle(pod, hashes)
        return self._real.store(pod, epoch, hashes)

    def remove(self, pod: str, epoch: str, hashes: Hashes) -> int:
        self._speculative.settle(pod, hashes)
        return self._real.remove(pod, epoch, hashes)

    def clear(self, pod: str, epoch: str) -> bool:
        self._speculative.drop(pod)
        return self._real.clear(pod, epoch)

    def drop(self, pod: str) -> bool:
        self._speculative.drop(pod)
        return self._real.drop(pod)
