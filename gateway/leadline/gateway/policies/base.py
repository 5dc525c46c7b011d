"""The contract of routing policies, and finding one by name.

A policy is a class with one method, `pick`; it keeps no state of pods (that is
pods.py) and of caches (that is index/), does no I/O and reads no clock. It is called on the event loop for
every request, so it must cost microseconds a pod.

Anyone can add one: a class with this method, named by an entry point of group `leadline.routing_policies`,
chosen with `--policy NAME` (`load_policy`).
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Protocol

import msgspec

from leadline.gateway.pods import Pod

__all__ = [
    "GROUP",
    "Decision",
    "PodScore",
    "PolicyError",
    "RouteRequest",
    "RoutingPolicy",
    "known_policies",
    "load_policy",
    "matched_tokens",
]


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A request at the moment when its pod is picked."""

    now: float
    """Monotonic seconds."""
    prompt_tokens: int
    max_tokens: int | None = None
    """Output tokens at most; None when the client set no limit."""
    matched_blocks: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Pod id → leading blocks of the prompt it holds (ServiceIndex.match). Empty when nothing is known."""
    block_size: int = 64
    """Tokens a block."""
    session: str | None = None
    """What names the conversation or user, for session affinity."""
    explain: bool = False
    """The client asked for X-Leadline-Explain: score every pod, not only the one picked."""


class PodScore(msgspec.Struct, frozen=True):
    """Why a pod was or was not picked. The four parts add up to `seconds`, if the policy estimates them."""

    pod: str
    matched_tokens: int
    requests: int
    """Running, waiting and on the way, as the gateway believes."""
    seconds: float | None = None
    """Expected time to first token and what the request costs the pod; None: the policy does not estimate."""
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    block_wait_seconds: float = 0.0
    decode_seconds: float = 0.0


class Decision(msgspec.Struct, frozen=True, eq=False):
    """The pod, and why."""

    pod: Pod
    policy: str
    reason: str
    """A short phrase for people: "soonest of 4", "2 of 4 about equal"."""
    picked: PodScore
    scores: tuple[PodScore, ...] = ()
    """All pods in the order given, when the request asked to have it explained."""


class RoutingPolicy(Protocol):
    """Chooses one of the pods that may be chosen."""

    def pick(self, request: RouteRequest, pods: Sequence[Pod]) -> Decision:
        """`pods` has at least one entry, all eligible (pods.eligible); ValueError when it is empty."""
        ...


def matched_tokens(request: RouteRequest, pod: Pod) -> int:
    """Prompt tokens the pod need not compute. At least the last token of a prompt is always computed."""
    held = request.matched_blocks.get(pod.id, 0) * request.block_size
    return max(0, min(held, request.prompt_tokens - 1))


def require(pods: Sequence[Pod]) -> None:
    """Raise ValueError when there is no pod: the caller of a policy handles that case first."""
    if not pods:
        raise ValueError("a routing policy needs at least one eligible pod to pick from")


def plain_scores(request: RouteRequest, pods: Sequence[Pod]) -> tuple[PodScore, ...]:
    """Scores without an estimate of seconds, for policies that make none."""
    now = request.now
    return tuple(PodScore(pod.id, matched_tokens(request, pod), pod.requests(now)) for pod in pods)


def plain_decision(
    policy: str, reason: str, request: RouteRequest, pod: Pod, pods: Sequence[Pod]
) -> Decision:
    """A decision of a policy that makes no estimate of seconds."""
    (picked,) = plain_scores(request, (pod,))
    scores = plain_scores(request, pods) if request.explain else ()
    return Decision(pod, policy, reason, picked, scores)


GROUP = "leadline.routing_policies"


class PolicyError(ValueError):
    """A policy that does not exist or cannot be made. The message says what would work."""


def known_policies() -> list[str]:
    """Names that `load_policy` takes, sorted."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def load_policy(name: str, **parameters: object) -> RoutingPolicy:
    """A new policy. Raises PolicyError for a name or parameter that is unknown, or a value that is bad."""
    points = [point for point in entry_points(group=GROUP) if point.name == name]
    if not points:
        known = ", ".join(known_policies()) or "none: is the package installed?"
        raise PolicyError(f"there is no routing policy {name!r}; known policies: {known}")
    point = points[0]
    try:
        kind = point.load()
    except (ImportError, AttributeError) as error:
        raise PolicyError(f"routing policy {name!r} ({point.value}) cannot be loaded: {error}") from error
    try:
        policy = kind(**parameters)
    except (TypeError, ValueError) as error:
        raise PolicyError(f"routing policy {name!r}: {error}") from error
    if not callable(getattr(policy, "pick", None)):
        raise PolicyError(f"routing policy {name!r} ({point.value}) has no method pick(request, pods)")
    made: RoutingPolicy = policy
    return made
