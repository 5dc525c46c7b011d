"""Policy `session`: the same pod for the same session, by rendezvous hashing with bounded load.

Every pod gets a score from hashing (session, pod id); the highest wins. When a pod comes or goes, only the
sessions it wins or held move (Thaler and Ravishankar, "Using name-based mappings to increase hit rates",
1998). A pod that has more than `bound` times the mean load is passed over for the next one (Mirrokni, Thorup
and Zadimoghaddam, "Consistent hashing with bounded loads", 2016), so one busy session cannot drown its pod.
"""

import random
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from math import ceil

from leadline.gateway.pods import Pod
from leadline.gateway.policies.base import Decision, RouteRequest, plain_decision, require

__all__ = ["SessionPolicy"]


class SessionPolicy:
    """Rendezvous hashing on `RouteRequest.session`; requests without one go to the less busy of two pods."""

    name = "session"

    def __init__(self, *, bound: float = 1.25, seed: int | None = None) -> None:
        if not bound > 1:
            raise ValueError(
                f"bound must be above 1 (1.25 lets a pod have 25 % more than the mean), not {bound}"
            )
        self.bound = bound
        self._random = random.Random(seed)

    def pick(self, request: RouteRequest, pods: Sequence[Pod]) -> Decision:
        require(pods)
        now = request.now
        if request.session is None:
            pair = self._random.sample(list(pods), min(2, len(pods)))
            pod = min(pair, key=lambda pod: pod.requests(now))
            return plain_decision(self.name, "no session: less busy of two", request, pod, pods)

        loads = [pod.requests(now) for pod in pods]
        # With this request counted in, some pod is always within the bound, since bound > 1.
        limit = ceil(self.bound * (sum(loads) + 1) / len(pods))
        key = hash64(request.session)
        scores = [mix(key ^ pod_hash(pod.id)) for pod in pods]
        home = max(range(len(pods)), key=scores.__getitem__)
        chosen = max((at for at, load in enumerate(loads) if load < limit), key=scores.__getitem__)
        reason = "home of the session" if chosen == home else f"home has {loads[home]} of {limit} requests"
        return plain_decision(self.name, reason, request, pods[chosen], pods)


def hash64(text: str) -> int:
    """64 bits of a text, the same in every gateway."""
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


pod_hash = lru_cache(maxsize=16_384)(hash64)


def mix(value: int) -> int:
    """A bijection of 64 bits that looks random (the finalizer of MurmurHash3)."""
    value ^= value >> 33
    value = value * 0xFF51AFD7ED558CCD & 0xFFFFFFFFFFFFFFFF
    value ^= value >> 33
    value = value * 0xC4CEB9FE1A85EC53 & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 33
