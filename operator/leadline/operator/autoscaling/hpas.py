"""Which objects HorizontalPodAutoscalers scale (KEDA makes such ones too), as the API server has them now.

Listed only for services with `autoscaling`, and for Deployments that an autoscaler has scaled. Not watched:
most clusters have many, and few concern us.
"""

from __future__ import annotations

import logging

import aiohttp

from leadline.operator.kube.api import ApiError, KubeApi
from leadline.operator.kube.kinds import Kind
from leadline.operator.planning.observed import Target

__all__ = ["HPA", "Hpas"]

log = logging.getLogger(__name__)

HPA = Kind("HorizontalPodAutoscaler", "autoscaling/v2", "horizontalpodautoscalers")


class Hpas:
    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._refused = ""

    async def targets(self, namespaces: tuple[str, ...] = ("",)) -> frozenset[Target] | None:
        """What is scaled in these namespaces, or in all of them. None: the API server does not tell."""
        found: set[Target] = set()
        try:
            for namespace in namespaces:
                items, _ = await self._api.list(HPA, namespace)
                for item in items:
                    reference = item["spec"]["scaleTargetRef"]
                    group, slash, _ = str(reference.get("apiVersion", "")).rpartition("/")
                    where = str(item["metadata"]["namespace"])
                    found.add(Target(group if slash else "", reference["kind"], where, reference["name"]))
        except ApiError as error:
            if error.is_permanent and str(error) != self._refused:
                self._refused = str(error)
                log.warning("whether an autoscaler has gone cannot be known: %s", error)
            return None
        except (aiohttp.ClientError, TimeoutError):
            return None
        return frozenset(found)
