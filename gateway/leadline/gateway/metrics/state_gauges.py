"""Gauges of the present state of services and pods, refreshed every few seconds and before a scrape.

A service or pod that is gone must not keep its last value: its series is removed, or, with several workers
(whose files keep every series), set to zero.
"""

import os
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Gauge

from leadline.gateway.services import Service
from leadline.gateway.upstream.breaker import CircuitBreaker

__all__ = ["StateGauges"]

_STATES = {"closed": 0, "half_open": 1, "open": 2}


class StateGauges:
    """Labelled by service, the circuits also by pod."""

    def __init__(self, registry: CollectorRegistry) -> None:
        own = ["service"]
        prefix = "leadline_gateway_"
        self._waiting = Gauge(
            f"{prefix}queued_requests",
            "Requests waiting for a pod with free capacity",
            own,
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._pods = Gauge(
            f"{prefix}pods",
            "Pods that may be picked",
            own,
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self._blocks = Gauge(
            f"{prefix}index_blocks",
            "Blocks in the prefix index, counted once for each pod that holds them",
            own,
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self._guesses = Gauge(
            f"{prefix}index_speculative_blocks",
            "Blocks that pods are expected to hold soon",
            own,
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._circuit = Gauge(
            f"{prefix}circuit_state",
            "Circuit of a pod: 0 closed, 1 half open, 2 open; the highest value of all workers",
            [*own, "pod"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._agrees = Gauge(
            f"{prefix}tokenizer_agrees",
            "Whether an engine tokenizes as the gateway does: 1 yes, 0 no, -1 it could not be asked",
            own,
            registry=registry,
            multiprocess_mode="livemin",
        )
        self._compared: set[str] = set()
        """Services whose tokenizer was compared with a pod's."""
        self._shown: dict[tuple[Gauge, tuple[str, ...]], float] = {}
        """Gauges of what `refresh` saw last (and their labels) → what they must be where it is gone."""

    def parity(self, service: str, agrees: bool | None) -> None:
        """What comparing tokenizers showed."""
        self._agrees.labels(service).set(-1 if agrees is None else int(agrees))
        self._compared.add(service)

    def refresh(self, services: Iterable[Service], now: float, waiting: Mapping[str, int]) -> None:
        """Look at all services. `waiting`: name → requests in the queue."""
        shown: dict[tuple[Gauge, tuple[str, ...]], float] = {}
        for service in services:
            name = service.name
            stats = service.index.stats()
            self._blocks.labels(name).set(stats.entries)
            self._guesses.labels(name).set(service.index.speculative_entries)
            usable = 0
            for pod in service.pods.values():
                circuit = pod.circuit
                state = circuit.state if isinstance(circuit, CircuitBreaker) else "closed"
                self._circuit.labels(name, pod.id).set(_STATES[state])
                shown[self._circuit, (name, pod.id)] = 0
                usable += pod.ready and not pod.draining and circuit.allows(now)
            self._pods.labels(name).set(usable)
            self._waiting.labels(name).set(waiting.get(name, 0))
            for gauge in (self._blocks, self._guesses, self._pods, self._waiting):
                shown[gauge, (name,)] = 0
            if name in self._compared:
                shown[self._agrees, (name,)] = -1
        for (gauge, labels), nothing in self._shown.items():
            if (gauge, labels) not in shown:
                self._gone(gauge, labels, nothing)
        self._shown = shown

    def _gone(self, gauge: Gauge, labels: tuple[str, ...], nothing: float) -> None:
        """Remove the series of a pod or service that is gone: its last value must not stay."""
        if gauge is self._agrees:
            self._compared.discard(labels[0])
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # where series stay until the process ends
            gauge.labels(*labels).set(nothing)
        else:
            gauge.remove(*labels)
