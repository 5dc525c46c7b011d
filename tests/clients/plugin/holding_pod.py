"""A routing policy for tests: the pod that holds most of the prompt, else the first one, whatever the load.

So all streams are on one pod until a test kills it.
"""

from collections.abc import Sequence

from leadline.gateway.pods import Pod
from leadline.gateway.policies.base import Decision, RouteRequest, plain_decision


class HoldingPod:
    """Picks by blocks of the prompt, then by name."""

    def pick(self, request: RouteRequest, pods: Sequence[Pod]) -> Decision:
        pod = min(pods, key=lambda pod: (-request.matched_blocks.get(pod.id, 0), pod.id))
        return plain_decision("holding-pod", "holds most of the prompt", request, pod, pods)
