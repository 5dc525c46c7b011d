"""Policy `least-load`: the pod with the fewest requests; equals at random."""

import random
from collections.abc import Sequence

from leadline.gateway.pods import Pod
from leadline.gateway.policies.base import Decision, RouteRequest, plain_decision, require

__all__ = ["LeastLoadPolicy"]


class LeastLoadPolicy:
    """Fewest requests running, waiting or on the way. Blind to caches and to the length of requests."""

    name = "least-load"

    def __init__(self, *, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def pick(self, request: RouteRequest, pods: Sequence[Pod]) -> Decision:
        require(pods)
        now = request.now
        loads = [pod.requests(now) for pod in pods]
        least = min(loads)
        idlest = [pod for pod, load in zip(pods, loads, strict=True) if load == least]
        pod = idlest[self._random.randrange(len(idlest))]
        reason = f"{least} requests, the fewest of {len(pods)}"
        return plain_decision(self.name, reason, request, pod, pods)
