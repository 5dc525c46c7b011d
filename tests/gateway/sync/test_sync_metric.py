"""What /metrics says of a gateway whose Redis comes, goes, and of a service that is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A process of its own: the library decides when it is imported whether there are several workers.
SCRIPT = """
from leadline.gateway.metrics import GatewayMetrics
from leadline.gateway.sync.counts import SyncCounts
from leadline.gateway.sync.metric import SyncMetric

metrics = GatewayMetrics()
reading = SyncMetric(metrics.registry)
stays, leaves = SyncCounts(connected=True, lag_seconds=2.5), SyncCounts(connected=False, lag_seconds=-0.1)
reading.show("d/stays", stays)
reading.show("d/leaves", leaves)
print(metrics.render().decode(), "=" * 9, sep="\\n")
stays.connected = False
reading.show("d/stays", stays)
reading.forget("d/leaves")
print(metrics.render().decode())
"""


def values(text: str) -> dict[str, float]:
    return {
        f"{name} {service}": float(line.rpartition(" ")[2])
        for line in text.splitlines()
        for name in ("redis_connected", "event_lag_seconds")
        for service in ("stays", "leaves")
        if line.startswith(f"leadline_gateway_{name}{{") and f'service="d/{service}"' in line
    }


@pytest.mark.parametrize("workers", [1, 2])
def test_a_redis_that_is_away_is_said_until_the_service_is_gone(tmp_path: Path, workers: int) -> None:
    places = {} if workers == 1 else {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **places},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    before, after = map(values, ran.stdout.split("=" * 9))
    assert before["redis_connected stays"] == 1
    assert before["event_lag_seconds stays"] == 2.5
    assert before["redis_connected leaves"] == 0
    assert before["event_lag_seconds leaves"] == 0, "clocks may differ; a negative time is none"
    assert after["redis_connected stays"] == 0
    assert after.get("redis_connected leaves", 1) == 1
    assert ("redis_connected leaves" in after) == (workers == 2)
