"""The operator's metrics, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["OperatorMetrics"]


class OperatorMetrics:
    """Labels are few and closed: methods, kinds, outcomes, reasons; never names."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.writes = Counter(
            "leadline_operator_api_writes_total",
            "Writes to the API server by method and kind; constant at steady state, except for kind Lease.",
            ["method", "kind"],
            registry=self.registry,
        )
        self.reconciles = Counter(
            "leadline_operator_reconciles_total",
            "Reconciles by outcome: unchanged, changed, gone, failed.",
            ["outcome"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "leadline_operator_reconcile_seconds",
            "Duration of one reconcile.",
            registry=self.registry,
            buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0),
        )
        self.queued = Gauge(
            "leadline_operator_queue_length", "Services waiting for a reconcile.", registry=self.registry
        )
        self.services = Gauge(
            "leadline_operator_services",
            "Services by the reason of their Ready condition.",
            ["reason"],
            registry=self.registry,
        )
        self.leading = Gauge(
            "leadline_operator_leading", "1 while this replica acts.", registry=self.registry
        )

        self.redis_users = Gauge(
            "leadline_operator_redis_users_connected",
            "1 while the users of services in Redis are maintained; 0 without an administrator's URL.",
            registry=self.registry,
        )

    def wrote(self, method: str, kind: str) -> None:
        self.writes.labels(method, kind).inc()
