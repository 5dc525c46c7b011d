"""Grafana's JSON out of tables: a dashboard is rows of panels, a panel is PromQL with legends."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

__all__ = ["Dashboard", "Panel", "render"]

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _HEIGHT = 24, 8


@dataclass(frozen=True, slots=True)
class Panel:
    """`queries`: (legend, PromQL). `kind`: timeseries or stat. `width`: of 24 columns."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str = ""
    kind: str = "timeseries"
    width: int = 8


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`rows`: (title, panels)."""

    uid: str
    title: str
    about: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    services_of: str = ""
    """Metric whose label `service` fills the chooser; empty: there is no chooser."""


def render(dashboard: Dashboard) -> str:
    """The JSON that Grafana imports."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in dashboard.rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
            }
        )
        x, y = 0, y + 1
        for panel in row:
            if x + panel.width > _COLUMNS:
                x, y = 0, y + _HEIGHT
            place = {"x": x, "y": y, "w": panel.width, "h": _HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, place))
            x += panel.width
        y += _HEIGHT
    document = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.about,
        "tags": ["leadline"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables(dashboard)},
        "annotations": {"list": []},
        "links": [
            {
                "type": "dashboards",
                "tags": ["leadline"],
                "title": "Leadline",
                "asDropdown": True,
                "includeVars": True,
            }
        ],
        "panels": panels,
    }
    return json.dumps(document, indent=1) + "\n"


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    custom = {"fillOpacity": 8, "lineWidth": 1, "showPoints": "never", "spanNulls": False}
    options: dict[str, Any] = {
        "timeseries": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"},
    }[panel.kind]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, **({"custom": custom} if panel.kind == "timeseries" else {})},
            "overrides": [],
        },
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": _SOURCE, "expr": expr, "legendFormat": legend}
            for place, (legend, expr) in enumerate(panel.queries)
        ],
    }


def _variables(dashboard: Dashboard) -> list[dict[str, Any]]:
    variables: list[dict[str, Any]] = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    ]
    if dashboard.services_of:
        query = f"label_values({dashboard.services_of}, service)"
        variables.append(
            {
                "name": "service",
                "label": "Service",
                "type": "query",
                "datasource": _SOURCE,
                "definition": query,
                "query": {"query": query, "refId": "services"},
                "refresh": 2,
                "sort": 1,
                "multi": True,
                "includeAll": True,
                "allValue": ".*",
                "current": {"text": ["All"], "value": ["$__all"]},
            }
        )
    return variables
