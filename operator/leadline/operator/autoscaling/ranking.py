"""Sets the deletion costs of a service's pods when it is about to shrink.

The only writes to pods that the operator makes. Best effort: a pod that cannot be asked or
written is no reason not to scale down.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp

from leadline.operator.autoscaling.usage import DELETION_COST, PodUse, deletion_costs, parse_use
from leadline.operator.kube.api import ApiError, KubeApi
from leadline.operator.kube.kinds import POD
from leadline.operator.planning.diagnosis import is_ready
from leadline.operator.planning.observed import active_pods
from leadline.operator.probes.pod_probe import PodProbe

__all__ = ["Ranker"]

log = logging.getLogger(__name__)

Object = dict[str, Any]


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
