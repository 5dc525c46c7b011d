"""Finds the gateway's replicas and reads what they count.

Its pods are listed by label, which needs only the rights of a watch; a Service would lead to one replica of
several. A replica that terminates still finishes streams: its answer counts, a missing answer does not.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp

from leadline.operator.autoscaling.demand import GatewayView, parse_gateway
from leadline.operator.kube.api import ApiError, KubeApi
from leadline.operator.kube.kinds import POD
from leadline.operator.planning.diagnosis import is_ready
from leadline.operator.probes.pod_probe import PodProbe
from leadline.operator.settings import OperatorSettings

__all__ = ["Gateways"]

log = logging.getLogger(__name__)

_PORT = 8080
_PORT_NAMES = ("metrics", "http")
"""The first that a pod has: `server.metrics_port` of the gateway is optional."""
_MAX_METRICS = 16 << 20
"""Bytes; about 10 KB for each service."""


class Gateways:
    def __init__(self, api: KubeApi, settings: OperatorSettings, probe: PodProbe) -> None:
        self._api, self._settings, self._probe = api, settings, probe
        self._refused = ""
        self._pods: list[dict[str, Any]] = []
        """As the API server listed them last."""

    async def views(self) -> list[GatewayView | None]:
        """One a replica, None for one that is silent. Empty: there is no gateway, or none that may be seen.
        [None] when the API server cannot be asked: there may be one, and nothing is known."""
        namespace = self._settings.gateway_namespace or self._settings.own_namespace
        selector = ",".join(f"{key}={value}" for key, value in self._settings.gateway_labels.items())
        try:
            self._pods, _ = await self._api.list(POD, namespace, selector)
        except ApiError as error:
            if not error.is_permanent:
                return [None]
            if str(error) != self._refused:
                self._refused = str(error)
                log.warning("the gateway's pods may not be listed, engine pods are asked instead: %s", error)
            self._pods = []
            return []
        except (aiohttp.ClientError, TimeoutError):
            return [None]
        return await self.views_of_known()

    async def views_of_known(self) -> list[GatewayView | None]:
        """The same from the replicas that `views` has found last, without a request to the API server."""
        leaving = [pod for pod in self._pods if pod["metadata"].get("deletionTimestamp")]
        serving = [pod for pod in self._pods if is_ready(pod) and pod not in leaving]
        views = await asyncio.gather(*map(self._view, [*serving, *leaving]))
        return [*views[: len(serving)], *(view for view in views[len(serving) :] if view is not None)]

    async def _view(self, pod: dict[str, Any]) -> GatewayView | None:
        address = pod.get("status", {}).get("podIP")
        text = await self._probe.metrics(address, _port(pod), most=_MAX_METRICS) if address else None
        try:
            return None if text is None else parse_gateway(text)
        except ValueError:
            return None


def _port(pod: dict[str, Any]) -> int:
    ports = [port for one in pod["spec"]["containers"] for port in one.get("ports") or []]
    named = {port.get("name"): int(port["containerPort"]) for port in ports}
    return next((named[name] for name in _PORT_NAMES if name in named), _PORT)
