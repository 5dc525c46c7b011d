"""Prometheus metrics of the gateway, `leadline_gateway_*`: all that requests count.

Labels are bounded: services and pods we know, status codes, fixed reasons; never what a client sent. With
several workers each counts into files of a shared directory (PROMETHEUS_MULTIPROC_DIR, set by main.py before
this module is imported), and whichever worker is scraped adds them up. What every request counts goes through
tallies: the worker that is scraped shows its own at once, the others `FLUSH_SECONDS` later. What services and
pods are like is in state_gauges.py.
"""

import asyncio
import os
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from leadline.gateway.metrics.state_gauges import StateGauges
from leadline.gateway.metrics.tallies import CountTally, GaugeTally, HistogramTally
from leadline.gateway.services import Service

__all__ = ["FLUSH_SECONDS", "GatewayMetrics", "ServiceMetrics"]

FLUSH_SECONDS = 0.5

_FAST = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class GatewayMetrics:
    """All series. `service(name)` gives those of one service, bound to its label."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        own = ["service"]
        prefix = "leadline_gateway_"
        self._settings_valid = Gauge(
            f"{prefix}settings_valid",
            "1: the settings file is valid; 0: it is not, and the settings read before stay in force",
            registry=registry,
            multiprocess_mode="livemin",
        )
        self._settings_valid.set(1)
        self._requests = Counter(
            f"{prefix}requests_total",
            "Requests by final status",
            [*own, "code"],
            registry=registry,
        )
        self._seconds = Histogram(
            f"{prefix}request_seconds",
            "Time from arrival to the end of the answer",
            own,
            buckets=_SLOW,
            registry=registry,
        )
        self._ttft = Histogram(
            f"{prefix}time_to_first_token_seconds",
            "Time from arrival to the first byte of a streamed answer",
            own,
            buckets=_SLOW,
            registry=registry,
        )
        self._itl = Histogram(
            f"{prefix}inter_token_seconds",
            "Time between two chunks of a streamed answer",
            own,
            buckets=_SLOW,
            registry=registry,
        )
        self._routing = Histogram(
            f"{prefix}routing_seconds",
            "Time to tokenize, match and pick, without the wait for a pod",
            own,
            buckets=_FAST,
            registry=registry,
        )
        self._queued = Histogram(
            f"{prefix}queue_seconds",
            "Wait for a pod with free capacity",
            own,
            buckets=_SLOW,
            registry=registry,
        )
        self._predicted = Counter(
            f"{prefix}predicted_cached_tokens_total",
            "Prompt tokens expected in the cache of the picked pod, for answers that report cached tokens",
            own,
            registry=registry,
        )
        self._actual = Counter(
            f"{prefix}actual_cached_tokens_total",
            "Prompt tokens found in the cache of the pod, as reported by the same answers",
            own,
            registry=registry,
        )
        self._prompt = Counter(
            f"{prefix}prompt_tokens_total",
            "Prompt tokens, counted by the engine where it reports usage",
            own,
            registry=registry,
        )
        self._output = Counter(
            f"{prefix}completion_tokens_total",
            "Output tokens, counted by the engine where it reports usage",
            own,
            registry=registry,
        )
        self._retries = Counter(
            f"{prefix}retries_total",
            "Attempts abandoned before their first byte",
            [*own, "reason"],
            registry=registry,
        )
        self._migrations = Counter(
            f"{prefix}migrations_total",
            "Streams that lost their pod, by whether another pod continued them",
            [*own, "outcome"],
            registry=registry,
        )
        self.stalled_clients = Counter(
            f"{prefix}stalled_clients_total",
            "Connections closed because their clients did not read their answers",
            registry=registry,
        )
        self.in_flight = Gauge(
            f"{prefix}in_flight_requests",
            "Requests being served",
            own,
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._known: dict[str, ServiceMetrics] = {}
        self._state = StateGauges(registry)
        self._timer: asyncio.TimerHandle | None = None

    def service(self, name: str) -> "ServiceMetrics":
        """`name`: a service we know, or "" for requests that got no further."""
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = ServiceMetrics(self, name)
        return found

    def flush(self) -> None:
        """Hand the tallies over."""
        self._timer = None
        for service in self._known.values():
            service.flush()

    def flush_soon(self) -> None:
        """A tally has changed."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self.flush)

    def parity(self, service: str, agrees: bool | None) -> None:
        """What comparing tokenizers showed."""
        self._state.parity(service, agrees)

    def refresh(self, services: Iterable[Service], now: float, waiting: dict[str, int] | None = None) -> None:
        """Bring everything up to date; called every few seconds and before an answer to a scrape."""
        for one in self._known.values():
            one.flush()
        self._state.refresh(services, now, waiting or {})

    def settings_file(self, valid: bool) -> None:
        self._settings_valid.set(int(valid))

    def render(self) -> bytes:
        """The text of `GET /metrics`."""
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
            return generate_latest(registry)
        return generate_latest(self.registry)


class ServiceMetrics:
    """The series of one service, looked up once."""

    __slots__ = (
        "_all",
        "_codes",
        "_in_flight",
        "_name",
        "_tallies",
        "actual",
        "itl",
        "output",
        "predicted",
        "prompt",
        "queued",
        "routing",
        "seconds",
        "ttft",
    )

    def __init__(self, all_metrics: GatewayMetrics, name: str) -> None:
        self._all = all_metrics
        self._name = name
        self._codes: dict[int, CountTally] = {}
        self.seconds = HistogramTally(all_metrics._seconds.labels(name))
        self.ttft = HistogramTally(all_metrics._ttft.labels(name))
        self.itl = HistogramTally(all_metrics._itl.labels(name))
        self.routing = HistogramTally(all_metrics._routing.labels(name))
        self.queued = HistogramTally(all_metrics._queued.labels(name))
        self.predicted = CountTally(all_metrics._predicted.labels(name))
        self.actual = CountTally(all_metrics._actual.labels(name))
        self.prompt = CountTally(all_metrics._prompt.labels(name))
        self.output = CountTally(all_metrics._output.labels(name))
        self._in_flight = GaugeTally(all_metrics.in_flight.labels(name))
        self._tallies: list[CountTally | GaugeTally | HistogramTally] = [
            self.seconds,
            self.ttft,
            self.itl,
            self.routing,
            self.queued,
            self.predicted,
            self.actual,
            self.prompt,
            self.output,
            self._in_flight,
        ]

    def began(self) -> None:
        """A request is being served; `ended` and `over` follow."""
        self._in_flight.value += 1
        self._all.flush_soon()

    def over(self) -> None:
        """It is no longer being served."""
        self._in_flight.value -= 1

    def ended(self, code: int) -> None:
        """A request ended with this status; 499: its client left."""
        counter = self._codes.get(code)
        if counter is None:
            counter = self._codes[code] = CountTally(self._all._requests.labels(self._name, str(code)))
            self._tallies.append(counter)
        counter.inc()
        self._all.flush_soon()

    def retried(self, reason: str) -> None:
        self._all._retries.labels(self._name, reason).inc()

    def migrated(self, outcome: str) -> None:
        self._all._migrations.labels(self._name, outcome).inc()

    def flush(self) -> None:
        for tally in self._tallies:
            tally.flush()
