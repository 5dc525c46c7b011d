"""Which pods a service would miss least: `controller.kubernetes.io/pod-deletion-cost`.

Pure. A ReplicaSet that shrinks removes pods that are not ready first, then those of the
lowest cost (its documentation, "Pod deletion cost"). The cost is set only when a service is about to shrink,
so that it costs no write at any other time.
"""

from __future__ import annotations

from dataclasses import dataclass

from leadline.operator.autoscaling.demand import parse_in_flight

__all__ = ["DELETION_COST", "PodUse", "deletion_costs", "parse_use"]

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_REQUEST = 1000
"""One request in flight, which a removed pod must drain, outweighs a whole warm cache."""


@dataclass(slots=True, frozen=True)
class PodUse:
    in_flight: float
    warmth: float
    """Share of its KV blocks that hold something, in [0, 1]."""


def parse_use(text: str) -> PodUse | None:
    """From an engine's metrics; None if they do not tell. Raises ValueError."""
    in_flight = parse_in_flight(text)
    if in_flight is None:
        return None
    blocks = {"": 0.0, "_used": 0.0, "_cached": 0.0}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        suffix = name.removeprefix("leadline_engine_kv_blocks")
        if suffix != name and suffix in blocks:
            blocks[suffix] = float(value)
    held = blocks["_used"] + blocks["_cached"]
    return PodUse(in_flight, min(held / blocks[""], 1.0) if blocks[""] else 0.0)


def deletion_costs(uses: dict[str, PodUse | None]) -> dict[str, int]:
    """Pod → cost. One that says nothing stands in the middle: it may be the busiest. Without two that say
    something there is no order, and no cost."""
    costs = {
        name: round(_REQUEST * use.in_flight + 100 * use.warmth)
        for name, use in uses.items()
        if use is not None
    }
    if len(costs) < 2:
        return {}
    middle = sorted(costs.values())[len(costs) // 2]
    return {name: min(costs.get(name, middle), 2**31 - 1) for name in uses}
