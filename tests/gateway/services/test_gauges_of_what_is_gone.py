"""Gauges of services and pods that are gone: an alert about one must end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A process of its own: the library decides when it is imported whether there are several workers.
SCRIPT = """
from leadline.gateway.config.settings import GatewayConfig, ServiceConfig
from leadline.gateway.services import make_service
from leadline.gateway.metrics.metrics import GatewayMetrics
from leadline.gateway.pods import Pod
from leadline.gateway.upstream.breaker import CircuitBreaker
from leadline.gateway.sync.counts import SyncCounts
from leadline.gateway.sync.counts import SyncMetric

metrics = GatewayMetrics()
reading = SyncMetric(metrics.registry)
config = GatewayConfig()
stays, leaves = (make_service(ServiceConfig(name=f"default/{name}"), config) for name in ("stays", "leaves"))
for service in (stays, leaves):
    service.pods["old"] = Pod("old", "127.0.0.1:1", circuit=CircuitBreaker())
    service.pods["old"].circuit.hold()
    metrics.parity(service.name, False)
waiting = {"default/stays": 2, "default/leaves": 3}
metrics.refresh([stays, leaves], 0.0, waiting)
reading.show(stays.name, SyncCounts(connected=True, lag_seconds=2.5))
reading.show(leaves.name, SyncCounts(connected=False, lag_seconds=-0.1))
before = metrics.render().decode()
stays.pods = {"new": Pod("new", "127.0.0.1:1", circuit=CircuitBreaker())}
metrics.refresh([stays], 0.0, waiting)
reading.show(stays.name, SyncCounts(connected=False))
reading.forget(leaves.name)
print(before, "=" * 9, metrics.render().decode(), sep="\\n")
"""


def series(text: str) -> dict[str, float]:
    """Series of the gauges → value, without what is unusual about none."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("leadline_gateway_") and "_created" not in name:
            labels = name.partition("{")[2].rstrip("}").replace('"', "").replace("default/", "")
            plain = dict(
                label.split("=") for label in labels.split(",") if "=" in label and label[:3] != "pid"
            )
            place = "/".join(plain[key] for key in ("service", "pod") if key in plain)
            found[f"{name.partition('{')[0].removeprefix('leadline_gateway_')} {place}"] = float(value)
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_what_was_true_of_a_service_or_pod_last_is_not_told_for_ever(tmp_path: Path, workers: int) -> None:
    places = {} if workers == 1 else {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **places},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    before, after = map(series, ran.stdout.split("=" * 9))
    for place in ("stays", "leaves"):
        assert before[f"circuit_state {place}/old"] == 2
        assert before[f"tokenizer_agrees {place}"] == 0
    assert before["queued_requests leaves"] == 3
    assert (before["redis_connected stays"], before["redis_connected leaves"]) == (1, 0)
    assert before["event_lag_seconds stays"] == 2.5
    assert before["event_lag_seconds leaves"] == 0, "clocks may differ; a negative time is none"
    # What stays has its present value.
    assert after["queued_requests stays"] == 2
    assert after["tokenizer_agrees stays"] == 0
    assert after["circuit_state stays/new"] == 0
    assert after["pods stays"] == 1
    assert after["redis_connected stays"] == 0
    # What is gone is not told at all, or as nothing that anybody would be called for.
    assert after.get("circuit_state stays/old", 0) == 0
    assert after.get("circuit_state leaves/old", 0) == 0
    assert after.get("queued_requests leaves", 0) == 0
    assert after.get("pods leaves", 0) == 0
    assert after.get("tokenizer_agrees leaves", -1) == -1
    assert after.get("redis_connected leaves", 1) == 1
    if workers == 1:
        assert not [name for name in after if name.endswith((" leaves", "/old")) and "index" in name]
