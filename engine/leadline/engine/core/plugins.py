"""Policies by name, through entry points, so that a user can add one without touching this package.

The built-in ones are known here as well: in a source tree that is not installed there are no entry points.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from leadline.engine.core.eviction import EvictionPolicy
from leadline.engine.core.policy import SchedulingPolicy
from leadline.engine.errors import ConfigError

__all__ = [
    "EVICTION_GROUP",
    "SCHEDULING_GROUP",
    "load_eviction_policy",
    "load_plugin",
    "load_scheduling_policy",
]

EVICTION_GROUP = "leadline.eviction_policies"
SCHEDULING_GROUP = "leadline.scheduling_policies"

_BUILT_IN = {
    EVICTION_GROUP: {
        "lru": "leadline.engine.core.eviction:LRUEviction",
        "length-aware": "leadline.engine.core.eviction:LengthAwareEviction",
    },
    SCHEDULING_GROUP: {"weighted": "leadline.engine.core.policy:WeightedPolicy"},
}
"""As pyproject.toml registers them; an installed entry point of the same name wins."""


def load_eviction_policy(name: str) -> EvictionPolicy:
    """A fresh eviction policy; raises ConfigError naming the known ones."""
    policy: EvictionPolicy = load_plugin(EVICTION_GROUP, "eviction_policy", name, EvictionPolicy, {})
    return policy


def load_scheduling_policy(name: str, class_weights: Mapping[str, float]) -> SchedulingPolicy:
    """A fresh scheduling policy, built with `class_weights=`; raises ConfigError naming the known ones."""
    arguments = {"class_weights": class_weights}
    policy: SchedulingPolicy = load_plugin(
        SCHEDULING_GROUP, "scheduling_policy", name, SchedulingPolicy, arguments
    )
    return policy


def load_plugin(group: str, setting: str, name: str, protocol: type, arguments: dict[str, Any]) -> Any:
    """Return a new object of the entry point `name`, built with `arguments`. Raises ConfigError that names
    `setting` where it is unknown, cannot be built or lacks a method of `protocol`."""
    known = {name: EntryPoint(name, value, group) for name, value in _BUILT_IN.get(group, {}).items()}
    known.update((entry.name, entry) for entry in entry_points(group=group))
    if name not in known:
        names = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"{setting} {name!r} is unknown; known: {names} (entry point group {group!r})")
    try:
        policy = known[name].load()(**arguments)
    except Exception as error:
        value = known[name].value
        raise ConfigError(
            f"{setting} {name!r} ({value}) cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(policy, protocol):
        raise ConfigError(
            f"{setting} {name!r} ({known[name].value}) lacks a method of {protocol.__name__}; "
            f"see {protocol.__module__}"
        )
    return policy
