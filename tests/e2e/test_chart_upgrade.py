"""One release through its life, with a real engine behind it: the chart of an older version, a Valkey of
one's own, the numbers that dashboards ask for, and an upgrade under load.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from promql import TARGET_LABELS, ask, expressions, tell
from real_cluster import CHART, Cluster, Namespace, values_here
from streams import Load

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PASSWORD = "a-Password.of_mine~1"
SECRET = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": "mine"},
    "stringData": {
        "pass": PASSWORD,
        "admin": f"redis://operator:{PASSWORD}@store-leadline-valkey:6379/0",
    },
}
SERVICE = {
    "apiVersion": "serving.leadline.io/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "smollm2"},
    "spec": {"model": "smollm2"},
}
LONG = "Sailors drop a lead line over the side to learn how deep the water is. " * 10
PUBLISHED = """
import redis, sys
client, service = redis.Redis.from_url(sys.argv[1]), sys.argv[2]
print(len(client.hgetall(service + "pods")), len(client.xrange(service + "events")))
"""


def older_chart(folder: Path) -> Path:
    chart = folder / "older"
    shutil.copytree(CHART, chart)
    described = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(
        yaml.safe_dump({**described, "version": "0.0.9", "appVersion": "0.0.9"})
    )
    return chart


@contextmanager
def installed(namespace: Namespace, name: str, chart: Path, values: dict[str, Any]) -> Iterator[None]:
    try:
        helm(namespace, "install", name, chart, values)
        yield
    finally:
        namespace.cluster.helm(
            "uninstall", name, "-n", namespace.name, "--wait", "--timeout=120s", check=False
        )


def helm(namespace: Namespace, verb: str, name: str, chart: Path, values: dict[str, Any]) -> None:
    file = chart.parent / f"{name}-values.json" if chart != CHART else Path(f"/tmp/{namespace.name}.json")
    file.write_text(json.dumps(values))
    try:
        namespace.cluster.helm(
            verb, name, str(chart), "-n", namespace.name, "-f", str(file), "--wait", "--timeout=180s"
        )
    except AssertionError as error:
        raise AssertionError(f"{error}\n{namespace.describe()}") from None
    finally:
        if chart == CHART:
            file.unlink()


def condition(namespace: Namespace) -> dict[str, Any]:
    found = namespace.get("isvc", "smollm2") or {}
    conditions = found.get("status", {}).get("conditions", [])
    return next((one for one in conditions if one["type"] == "Ready"), {})


def pods(namespace: Namespace, selector: str) -> dict[str, dict[str, Any]]:
    """uid → pod, those that are not leaving."""
    return {
        one["metadata"]["uid"]: one
        for one in namespace.items("pods", selector)
        if not one["metadata"].get("deletionTimestamp")
    }


def metrics(namespace: Namespace, selector: str, port: int) -> str:
    """What a pod says at /metrics, by way of the API server."""
    (pod,) = pods(namespace, selector).values()
    path = f"/api/v1/namespaces/{namespace.name}/pods/{pod['metadata']['name']}:{port}/proxy/metrics"
    return namespace.kubectl("get", "--raw", path)


GATEWAY = "app.kubernetes.io/instance=r,app.kubernetes.io/component=gateway"
OPERATOR = "app.kubernetes.io/instance=r,app.kubernetes.io/component=operator"
ENGINE = "serving.leadline.io/service=smollm2"


def test_an_upgrade_under_load_cuts_no_stream_and_leaves_engines_alone(
    cluster: Cluster, tmp_path: Path
) -> None:
    old = older_chart(tmp_path)
    with cluster.namespace("upgrade") as namespace:
        namespace.kubectl("create", "-f", "-", text=json.dumps(SECRET))
        # A Valkey that is not the release's own, with the password of a Secret: another release's, in fact.
        store = values_here(
            operator={"enabled": False},
            gateway={"enabled": False},
            valkey={"existingSecret": "mine", "existingSecretKeys": {"gateway": "pass", "operator": "pass"}},
            networkPolicy={"enabled": False},
            crds={"install": False},
        )
        values = values_here(
            namespaced=True,
            valkey={"enabled": False},
            externalRedis={
                "host": "store-leadline-valkey",
                "username": "gateway",
                "passwordSecret": {"name": "mine", "key": "pass"},
                "adminSecret": {"name": "mine", "key": "admin"},
            },
            gateway={"drainSeconds": 150},
        )
        with (
            installed(namespace, "store", old, store),
            installed(namespace, "r", old, values),
        ):
            namespace.kubectl("create", "-f", "-", text=json.dumps(SERVICE))
            seconds = namespace.until("Ready", lambda: condition(namespace).get("status") == "True", 300)
            print(f"Ready after {seconds:.1f} s")
            url = namespace.node_port("r-leadline-gateway")
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as client:
                namespace.until(
                    "the gateway names the model", lambda: [one.id for one in client.models.list()], 30
                )
                for _ in range(2):
                    client.chat.completions.create(
                        model="smollm2", messages=[{"role": "user", "content": LONG}], max_tokens=1
                    )
            told = tell(metrics(namespace, GATEWAY, 9090))
            store_url = f"redis://gateway:{PASSWORD}@store-leadline-valkey:6379/0"
            ours = f"leadline:{{{namespace.name}/smollm2}}:"
            reports, batches = map(int, namespace.python("keys", PUBLISHED, store_url, ours).split())
            assert reports == 1, "the engine reports to that Valkey, with a user of its service"
            assert batches > 0
            log = namespace.kubectl("logs", "deployment/r-leadline-gateway")
            assert "counting in Redis at redis://store-leadline-valkey:6379/0" in log
            assert PASSWORD not in log

            # What dashboards and alerts ask for is what these processes tell.
            for text in (metrics(namespace, ENGINE, 8000), metrics(namespace, OPERATOR, 8080)):
                for name, labels in tell(text).series.items():
                    told.series.setdefault(name, set()).update(labels)
            for where, expression in expressions():
                for name, matched in ask(expression).series.items():
                    assert name in told.series, f"{where}: nobody has {name}"
                    if told.series[name]:
                        assert matched <= told.series[name] | TARGET_LABELS, f"{where}: {name}"

            cluster.helm("test", "r", "-n", namespace.name, "--timeout", "60s")

            before = {selector: pods(namespace, selector) for selector in (GATEWAY, OPERATOR, ENGINE)}
            transition = condition(namespace)["lastTransitionTime"]
            load = Load(url, "smollm2")
            try:
                namespace.until("streams are under way", lambda: running(namespace) >= 3, 60)
                values["gateway"]["config"] = {"admission": {"max_queued": 999}}
                values["operator"]["logLevel"] = "debug"
                began = time.monotonic()
                helm(namespace, "upgrade", "r", CHART, values)
                print(f"upgraded in {time.monotonic() - began:.1f} s")
                (gone,) = before[GATEWAY].values()
                seconds = namespace.until(
                    "the old gateway has left",
                    lambda: namespace.get("pod", gone["metadata"]["name"]) is None,
                    90,
                )
                left = time.monotonic()
                print(f"the old gateway drained for {seconds:.1f} s after that")
            finally:
                streams = load.stop()
            print(f"{len(streams)} streams, {sum(one.pieces for one in streams)} pieces")
            assert [one for one in streams if one.error or one.finish != "length"] == []
            across = [one for one in streams if one.began < began and one.ended > began]
            assert len(across) == 3, "each thread had a stream under way when the upgrade began"
            assert any(one.began > left for one in streams) or streams[-1].ended > left

            after = {selector: pods(namespace, selector) for selector in (GATEWAY, OPERATOR, ENGINE)}
            assert not set(before[GATEWAY]) & set(after[GATEWAY])
            assert not set(before[OPERATOR]) & set(after[OPERATOR])
            assert set(before[ENGINE]) == set(after[ENGINE]), "engines stay"
            assert condition(namespace)["lastTransitionTime"] == transition, "Ready all the time"

            # The new operator acts.
            namespace.kubectl("delete", "isvc", "smollm2", "--wait=true", "--timeout=60s")
            namespace.until("the engine is gone", lambda: not namespace.items("pods", ENGINE), 90)


def running(namespace: Namespace) -> float:
    """Sequences in the engine's batch."""
    text = metrics(namespace, ENGINE, 8000)
    return next(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("leadline_engine_running_requests ")
    )
