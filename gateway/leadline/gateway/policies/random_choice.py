"""Policy `random`: any pod, all equally likely. The yardstick for the others."""

import random
from collections.abc import Sequence

from leadline.gateway.pods import Pod
from leadline.gateway.policies.base import Decision, RouteRequest, plain_decision, require

__all__ = ["RandomPolicy"]


class RandomPolicy:
    """Uniform choice, blind to load and caches."""

    name = "random"

    def __init__(self, *, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def pick(self, request: RouteRequest, pods: Sequence[Pod]) -> Decision:
        require(pods)
        pod = pods[self._random.randrange(len(pods))]
        return plain_decision(self.name, f"any of {len(pods)}", request, pod, pods)
