"""Sets `controller.kubernetes.io/pod-deletion-cost` on a service's pods when it is about to shrink.

A ReplicaSet that shrinks removes pods that are not ready first, then those with the lowest cost (its
documentation, "Pod deletion cost"). These are the only writes to pods that the operator makes, and it makes
them only before a service shrinks. Best effort: a pod that does not answer or cannot be written is no reason
not to scale down.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import Any

import aiohttp

from leadline.operator.autoscaling.demand import parse_in_flight
from leadline.operator.kube.api import ApiError, KubeApi
from leadline.operator.kube.kinds import POD
from leadline.operator.planning.diagnosis import is_ready
from leadline.operator.planning.observed import active_pods
from leadline.operator.probes.pod_probe import PodProbe

__all__ = ["DELETION_COST", "PodUse", "Ranker", "deletion_costs", "parse_use"]

log = logging.getLogger(__name__)

Object = dict[str, Any]
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_REQUEST = 1000
"""One request in flight, which a removed pod must drain, outweighs a whole warm cache."""


class Ranker:
    def __init__(self, api: KubeApi, probe: PodProbe) -> None:
        self._api, self._probe = api, probe

    async def before(
        self, wanted: Object, children: dict[tuple[str, str], Object], pods: list[Object]
    ) -> None:
        """Call before the Deployment `wanted` is applied: rank the pods if it wants fewer than it did."""
        live = children.get(("Deployment", wanted["metadata"]["name"]))
        replicas = wanted["spec"].get("replicas")
        ready = [pod for pod in active_pods(pods) if is_ready(pod)]
        if live is None or replicas is None or replicas >= live["spec"].get("replicas", 1):
            return
        if replicas == 0 or len(ready) <= replicas:
            return  # all of them go, or none that serves
        uses = await asyncio.gather(*map(self._use, ready))
        by_name = dict(zip((str(pod["metadata"]["name"]) for pod in ready), uses, strict=True))
        costs = deletion_costs(by_name)
        await asyncio.gather(*(self._set(pod, costs) for pod in ready))

    async def _use(self, pod: Object) -> PodUse | None:
        text = await self._probe.metrics(pod["status"]["podIP"])
        try:
            return None if text is None else parse_use(text)
        except ValueError:
            return None

    async def _set(self, pod: Object, costs: dict[str, int]) -> None:
        metadata = pod["metadata"]
        cost = costs.get(str(metadata["name"]))
        if cost is None or (metadata.get("annotations") or {}).get(DELETION_COST) == str(cost):
            return
        try:
            await self._api.annotate(POD, metadata, {DELETION_COST: str(cost)})
        except (ApiError, aiohttp.ClientError, TimeoutError) as error:
            log.warning(
                "%s/%s: no deletion cost: %s",
                metadata["namespace"],
                metadata["name"],
                str(error) or type(error).__name__,
            )


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
    share = (blocks["_used"] + blocks["_cached"]) / blocks[""] if blocks[""] else 0.0
    if math.isnan(share):
        raise ValueError("the KV blocks are no numbers")
    return PodUse(in_flight, min(max(share, 0.0), 1.0))


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
