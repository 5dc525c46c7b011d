"""Computes bounds of the requests that a service has in flight, from texts of /metrics.

Pure. The gateway's replicas count best, since they include requests that wait for a pod. Where no gateway
knows the service, the pods' own counts are used.

    every replica of the gateway answered   exactly their sum
    some did not answer                     at least the sum of the others: enough to scale up, never down
    there are replicas, none answered       unknown: keep the number of pods (P23)
    no gateway that knows the service       the pods' sum; a silent pod has between zero and a full load
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = [
    "Demand",
    "GatewayView",
    "gateway_counts",
    "of_gateway",
    "of_pods",
    "parse_gateway",
    "parse_in_flight",
]


@dataclass(slots=True, frozen=True)
class Demand:
    """Requests in flight lie between the two."""

    low: float
    high: float
    ended: float = 0.0
    """Requests that the gateways have answered so far. A change means that there was a request."""


@dataclass(slots=True, frozen=True)
class GatewayView:
    """What one replica of the gateway says: requests in flight, by each service that it knows."""

    in_flight: dict[str, float]
    """<namespace>/<name> → requests."""
    ended: dict[str, float] = field(default_factory=dict)
    """The same → requests answered since it started."""


_MOST_REQUESTS = 1e9
"""More is a fault of the pod, whose image may be anybody's."""
_SAMPLE = re.compile(
    r'leadline_gateway_(pods|in_flight_requests)\{service="([^"]*)"\} ([0-9.eE+-]+)', re.ASCII
)
_ENDED = re.compile(
    r'leadline_gateway_requests_total\{code="[^"]*",service="([^"]*)"\} ([0-9.eE+-]+)', re.ASCII
)


def parse_gateway(text: str) -> GatewayView | None:
    """A gateway's metrics; None for something else. It knows the services whose pods it counts. Raises
    ValueError for a number that is none."""
    known: set[str] = set()
    counted: dict[str, float] = {}
    for kind, service, value in _SAMPLE.findall(text):
        if kind == "pods":
            known.add(service)
        else:
            counted[service] = float(value)
    if not known and "leadline_gateway_" not in text:
        return None
    ended: dict[str, float] = {}
    for service, value in _ENDED.findall(text):
        ended[service] = ended.get(service, 0.0) + float(value)
    return GatewayView({service: counted.get(service, 0.0) for service in known}, ended)


def gateway_counts(views: Sequence[GatewayView | None], service: str) -> bool:
    """Whether the gateway is the one to ask for a service. `views`: of all replicas, None where one is
    silent. One that answers speaks for the silent ones here: they look at the same cluster."""
    answered = [view for view in views if view is not None]
    return bool(views) and (not answered or any(service in view.in_flight for view in answered))


def of_gateway(views: Sequence[GatewayView | None], service: str) -> Demand | None:
    """None if every replica is silent."""
    answered = [view for view in views if view is not None]
    if not answered:
        return None
    total = sum(view.in_flight.get(service, 0.0) for view in answered)
    ended = sum(view.ended.get(service, 0.0) for view in answered)
    return Demand(total, total if len(answered) == len(views) else math.inf, ended)


def of_pods(loads: Sequence[float | None], target: int) -> Demand | None:
    """From the ready pods; None where one is silent. `target`: requests a full pod has."""
    known = [load for load in loads if load is not None]
    if not known:
        return None
    return Demand(sum(known), sum(known) + (len(loads) - len(known)) * target)


def parse_in_flight(text: str) -> float | None:
    """Return the running and waiting requests in an engine's metrics; None if it does not tell. Raises
    ValueError for what is no number of requests, such as NaN."""
    values = [
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith(("leadline_engine_running_requests", "leadline_engine_waiting_requests"))
    ]
    if not values:
        return None
    total = sum(values)
    if not 0 <= total <= _MOST_REQUESTS:
        raise ValueError(f"{total} requests in flight")
    return total
