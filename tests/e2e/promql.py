"""What the chart's dashboards and alerts ask Prometheus, and what our three processes tell it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import promql_parser
import yaml
from prometheus_client.parser import text_string_to_metric_families
from real_cluster import CHART

__all__ = ["TARGET_LABELS", "Asked", "Told", "alerts", "ask", "expressions", "tell"]

TARGET_LABELS = frozenset({"service", "pod", "namespace", "instance"})
"""Put on every series of an engine by the chart's PodMonitor; others have those but `service` too."""
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


@dataclass(slots=True)
class Asked:
    """Of one expression: the series and, by each, labels that are matched; labels that are grouped by."""

    series: dict[str, set[str]] = field(default_factory=dict)
    grouped: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Told:
    """Names of series → labels, as far as there were samples to see them on."""

    series: dict[str, set[str]] = field(default_factory=dict)


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of everything in the chart, with Grafana's variables filled in."""
    for file in sorted((CHART / "dashboards").glob("*.json")):
        document = json.loads(file.read_text())
        for panel in document["panels"]:
            for target in panel.get("targets", ()):
                yield f"{file.name}, {panel['title']}", _filled(target["expr"])
        for variable in document["templating"]["list"]:
            if variable["type"] == "query":
                metric = variable["definition"].removeprefix("label_values(").partition(",")[0]
                yield f"{file.name}, chooser {variable['name']}", metric
    for rule in alerts():
        yield rule["alert"], rule["expr"]


def _filled(expression: str) -> str:
    return expression.replace("$__rate_interval", "5m").replace("$service", ".*")


def ask(expression: str) -> Asked:
    """Raises ValueError where Prometheus would."""
    asked = Asked()

    def visit(node: promql_parser.Expr) -> bool:
        # A matrix selector holds its vector selector where walk does not go.
        selector = node.vector_selector if isinstance(node, promql_parser.MatrixSelector) else node
        if isinstance(selector, promql_parser.VectorSelector):
            labels = asked.series.setdefault(selector.name, set())
            labels |= {matcher.name for matcher in selector.matchers.matchers}
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            asked.grouped |= set(node.modifier.labels)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return asked


def tell(text: str) -> Told:
    """Parse `GET /metrics`. A series without samples has only its TYPE line."""
    told = Told()
    for family in text_string_to_metric_families(text):
        for suffix in _SUFFIXES.get(family.type, ("",)):
            told.series.setdefault(family.name + suffix, set())
        for sample in family.samples:
            told.series.setdefault(sample.name, set()).update(sample.labels)
    return told
