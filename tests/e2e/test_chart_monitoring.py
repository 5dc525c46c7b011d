"""Dashboards and alerts: PromQL that Prometheus takes, about series that the processes really have."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from promql import TARGET_LABELS, Told, alerts, ask, expressions, tell
from real_cluster import CHART, ROOT, Cluster

CASES = Path(__file__).with_name("alerts.promtool.yaml")


async def told_in_process() -> Told:
    """By the three sets of metrics, each after something was counted."""
    from prometheus_client import generate_latest

    from leadline.engine.core.stats import SchedulerStats, Speeds
    from leadline.engine.server.metrics.metrics import Metrics, RequestTimer
    from leadline.gateway.metrics.metrics import GatewayMetrics
    from leadline.gateway.sync.counts import SyncCounts, SyncMetric
    from leadline.gateway.tokens.mode import ModeMetric, TokenMode
    from leadline.operator.metrics import OperatorMetrics

    stats = SchedulerStats(*[0] * 3, {}, *[0] * 14)  # type: ignore[arg-type]
    engine = Metrics(lambda: (stats, Speeds(0.0, 0.0), 0.0, True))
    with RequestTimer(engine, "chat"):
        pass
    gateway = GatewayMetrics()
    service = gateway.service("llm/m")
    service.ended(200)
    service.retried("connect")
    service.migrated("moved")
    gateway.parity("llm/m", True)
    ModeMetric(gateway.registry).show("llm/m", TokenMode())
    SyncMetric(gateway.registry).show("llm/m", SyncCounts())
    gateway.refresh([], 0.0)
    operator = OperatorMetrics()
    operator.wrote("patch", "Service")
    operator.reconciles.labels("changed").inc()
    operator.services.labels("Ready").inc()
    text = engine.render() + gateway.render() + generate_latest(operator.registry)
    return tell(text.decode())


def test_the_dashboards_are_those_of_their_tables() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "charts" / "dashboards.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


async def test_every_expression_parses_and_asks_for_series_that_exist() -> None:
    told = (await told_in_process()).series
    asked_for = set()
    for where, expression in expressions():
        asked = ask(expression)
        assert asked.series, f"{where}: no series in {expression}"
        for name, matched in asked.series.items():
            assert name in told, f"{where}: nobody has {name}"
            if told[name]:
                allowed = told[name] | TARGET_LABELS
                assert matched <= allowed, f"{where}: {name} has {sorted(allowed)}"
        grouped = asked.grouped - {"le"} - TARGET_LABELS
        assert grouped <= set().union(*(told[name] for name in asked.series)), f"{where}: {expression}"
        asked_for |= set(asked.series)
    assert len(asked_for) > 40


async def test_an_expression_that_is_wrong_is_found() -> None:
    with pytest.raises(ValueError, match="parenthesis"):
        ask("sum by (service (leadline_gateway_pods)")
    found = ask('rate(leadline_gateway_pods_total{code="1"}[5m]) > on (service) sum by (pod) (b)')
    assert found.series == {"leadline_gateway_pods_total": {"code"}, "b": set()}
    assert found.grouped == {"pod"}
    assert "leadline_gateway_pods_total" not in (await told_in_process()).series


async def test_every_series_of_ours_is_on_a_dashboard() -> None:
    shown = {
        name for where, expression in expressions() if ".json" in where for name in ask(expression).series
    }
    shown = {name.removesuffix("_bucket") for name in shown}
    made = {
        name.removesuffix("_bucket")
        for name in (await told_in_process()).series
        if not name.endswith(("_sum", "_count"))
    }
    assert made - shown == set(), "put them on a panel of charts/dashboards.py"


def test_panels_neither_overlap_nor_leave_the_grid() -> None:
    for file in (CHART / "dashboards").glob("*.json"):
        taken: set[tuple[int, int]] = set()
        document = json.loads(file.read_text())
        assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
        for panel in document["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, f"{file.name}: {panel['title']}"
            assert max(x for x, _ in cells) < 24
            taken |= cells


def fires(case: dict[str, Any]) -> bool:
    return bool(case["exp_alerts"])


def test_every_alert_has_a_case_in_which_it_fires_and_text_that_says_what_to_do() -> None:
    cases = [case for test in yaml.safe_load(CASES.read_text())["tests"] for case in test["alert_rule_test"]]
    for rule in alerts():
        assert any(fires(case) for case in cases if case["alertname"] == rule["alert"]), rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "description"} <= set(rule["annotations"])


@pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool is not on PATH (apt-get install prometheus)"
)
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    done = subprocess.run(["promtool", "test", "rules", str(CASES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    # The same for what dashboards ask: Prometheus's own parser, not only ours.
    rules = [{"record": f"panel:{place}", "expr": expr} for place, (_, expr) in enumerate(expressions())]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout + done.stderr


MONITORED = {
    "podMonitor": {"enabled": True},
    "prometheusRule": {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "disabled": ["LeadlineQueueStays"],
        "additionalGroups": [{"name": "mine", "rules": [{"alert": "Mine", "expr": "vector(1)"}]}],
    },
    "dashboards": {"enabled": True, "namespace": "monitoring"},
}


@pytest.mark.cluster
def test_the_chart_renders_monitors_rules_and_dashboards(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(MONITORED))
    text = cluster.helm("template", "r", str(CHART), "-n", "system", "-f", str(file))
    documents = [one for one in yaml.safe_load_all(text) if one]

    def of(kind: str) -> list[dict[str, Any]]:
        return [one for one in documents if one["kind"] == kind]

    (rule,) = of("PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    names = [one["alert"] for group in rule["spec"]["groups"] for one in group["rules"]]
    assert names == [one["alert"] for one in alerts() if one["alert"] != "LeadlineQueueStays"] + ["Mine"]

    boards = [one for one in of("ConfigMap") if one["metadata"]["namespace"] == "monitoring"]
    assert len(boards) == 3
    for board in boards:
        assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
        ((name, text),) = board["data"].items()
        assert text.strip() == (CHART / "dashboards" / name.removeprefix("leadline-")).read_text().strip()

    # What a monitor selects, and the port it names, must be in the pods that it is for.
    deployments = {one["metadata"]["labels"]["app.kubernetes.io/component"]: one for one in of("Deployment")}
    monitors = {one["metadata"]["labels"]["app.kubernetes.io/component"]: one for one in of("PodMonitor")}
    assert set(monitors) == {"gateway", "operator", "engines"}
    for component in ("gateway", "operator"):
        template, monitor = deployments[component]["spec"]["template"], monitors[component]["spec"]
        labels = template["metadata"]["labels"].items()
        assert monitor["selector"]["matchLabels"].items() <= labels
        ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= ports
    (relabeling,) = monitors["engines"]["spec"]["podMetricsEndpoints"][0]["relabelings"]
    assert relabeling["targetLabel"] == "service"
