"""Finding a routing policy by name, ours or another package's, through entry points."""

from importlib.metadata import entry_points

from leadline.gateway.policies.base import RoutingPolicy

__all__ = ["GROUP", "PolicyError", "known_policies", "load_policy"]

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
