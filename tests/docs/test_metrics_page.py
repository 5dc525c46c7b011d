"""docs/metrics.md has every series, with its labels and its sentence in /metrics."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from leadline.engine.core.stats import SchedulerStats, Speeds
from leadline.engine.server.metrics.metrics import Metrics
from leadline.gateway.metrics.metrics import GatewayMetrics
from leadline.gateway.sync.counts import SyncMetric
from leadline.gateway.tokens.mode import ModeMetric
from leadline.operator.metrics import OperatorMetrics

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def engine() -> list[CollectorRegistry]:
    counts = {field.name: 0 for field in dataclasses.fields(SchedulerStats)}
    stats = SchedulerStats(**{**counts, "waiting_by_class": {}})
    metrics = Metrics(lambda: (stats, Speeds(0, 0), 0, True))
    return [metrics._core, metrics.counted]


def gateway() -> list[CollectorRegistry]:
    registry = GatewayMetrics().registry
    ModeMetric(registry)
    SyncMetric(registry)
    return [registry]


def operator() -> list[CollectorRegistry]:
    return [OperatorMetrics().registry]


def labels(registry: CollectorRegistry, family: Metric) -> Iterable[str]:
    for collector, names in registry._collector_to_names.items():
        if family.name in names:
            return getattr(collector, "_labelnames", ())
    return {name: None for sample in family.samples for name in sample.labels}


def rows(registries: list[CollectorRegistry]) -> list[str]:
    found = []
    for registry in registries:
        for family in registry.collect():
            name = family.name + ("_total" if family.type == "counter" else "")
            label = ", ".join(labels(registry, family))
            text = family.documentation.removesuffix(".")
            found.append(f"| `{name}` | {family.type} | {label} | {text} |")
    return sorted(found)


@pytest.mark.parametrize("room", [engine, gateway, operator])
def test_the_page_has_what_metrics_has(room: type) -> None:
    shown = re.findall(rf"^\| `leadline_{room.__name__}_.*$", PAGE, re.MULTILINE)
    assert sorted(shown) == rows(room())
