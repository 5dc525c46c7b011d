"""Six lines of YAML to an answer: chart, operator, engine, gateway, and nothing left afterwards."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import yaml
from real_cluster import ROOT, Audit, Cluster, Namespace, values_here
from streams import Load
from two_turns import second_turn_is_as_predicted

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SAMPLES = ROOT / "manifests" / "samples"
CHILDREN = (
    "deployments,replicasets,pods,services,endpointslices,serviceaccounts,configmaps,secrets,persistentvolumeclaims,"
    "networkpolicies,poddisruptionbudgets"
)
ASK = """
import sys, time, urllib.error, urllib.request
ends = time.monotonic() + float(sys.argv[2])
while True:
    try:
        print(urllib.request.urlopen(sys.argv[1], timeout=2).status)
    except urllib.error.HTTPError as error:
        print(error.code)
    except OSError:
        # Policies drop or reject; and where a pod is new, they let it in a second or two later.
        if time.monotonic() < ends:
            time.sleep(0.2)
            continue
        print("no answer")
    break
"""


def ready(namespace: Namespace, name: str) -> dict[str, Any]:
    """The Ready condition; empty: there is none yet."""
    found = namespace.get("isvc", name) or {}
    conditions = found.get("status", {}).get("conditions", [])
    return next((one for one in conditions if one["type"] == "Ready"), {})


def ask(url: str, model: str) -> str:
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", timeout=120)
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=16,
        temperature=0,
    )
    return answer.choices[0].message.content or ""


@dataclass(frozen=True)
class Installed:
    """The chart, and a namespace that its operator serves."""

    system: Namespace
    namespace: Namespace
    gateway: str
    """URL that this machine can reach."""


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Iterator[Installed]:
    values = values_here(operator={"extraArgs": ["--resync-seconds=2", "--autoscale-seconds=2"]})
    with (
        cluster.namespace("system") as system,
        cluster.namespace("llm") as namespace,
        system.release("r", values, serves=(namespace,)) as seconds,
    ):
        print(f"chart installed and ready in {seconds:.1f} s")
        yield Installed(system, namespace, system.node_port("r-leadline-gateway"))


def until_ready(here: Installed, name: str) -> float:
    """Seconds until the service was ready; a failure shows both namespaces."""
    try:
        return here.namespace.until(
            f"{name} is ready", lambda: ready(here.namespace, name).get("status") == "True", 400
        )
    except AssertionError as error:
        raise AssertionError(f"{error}\n-- the chart's namespace\n{here.system.describe()}") from None


def test_six_lines_answer_a_chat_and_deleting_them_leaves_nothing(installed: Installed) -> None:
    system, namespace = installed.system, installed.namespace
    began = time.monotonic()
    namespace.apply((SAMPLES / "smollm2.yaml").read_text())
    seconds = until_ready(installed, "smollm2")
    print(f"Ready {seconds:.1f} s after the apply: {ready(namespace, 'smollm2')['message']}")
    print(namespace.kubectl("get", "isvc"))
    assert "Paris" in ask(installed.gateway, "smollm2")
    print(f"answered {time.monotonic() - began:.1f} s after the apply")
    print(second_turn_is_as_predicted(installed.gateway, "smollm2", namespace.until))

    # NetworkPolicy: the engine answers the gateway's pods only.
    address = namespace.items("pods", "serving.leadline.io/service=smollm2")[0]["status"]["podIP"]
    health = f"http://{address}:8000/health"
    assert namespace.python("stranger", ASK, health, "5").strip() == "no answer"
    assert system.python("neighbour", ASK, health, "5").strip() == "no answer"
    gateways = {"app.kubernetes.io/instance": "r", "app.kubernetes.io/component": "gateway"}
    assert system.python("as-gateway", ASK, health, "20", labels=gateways).strip() == "200"
    assert namespace.python("impostor", ASK, health, "5", labels=gateways).strip() == "no answer"
    url = (namespace.get("isvc", "smollm2") or {})["status"]["url"]
    assert namespace.python("client", ASK, f"{url}/models", "20").strip() == "200"

    if os.environ.get("LEADLINE_E2E_AUDIT_LOG"):
        writes_nothing(system)
    sleeps_and_wakes(installed)
    log = system.kubectl("logs", "deployment/r-leadline-operator")
    assert "forbidden" not in log.lower(), log

    began = time.monotonic()
    namespace.kubectl("delete", "isvc", "smollm2", "--wait=true", "--timeout=60s")
    selector = "serving.leadline.io/service=smollm2"
    namespace.until("nothing is left", lambda: not namespace.items(CHILDREN, selector), 120)
    print(f"nothing left {time.monotonic() - began:.1f} s after the delete")


def sleeps_and_wakes(here: Installed) -> None:
    """Without requests the service gives up its pod; the next one brings it back and is answered."""
    scaling = {"spec": {"autoscaling": {"min": 0, "max": 2, "idleSeconds": 10}}}
    here.namespace.kubectl("patch", "isvc", "smollm2", "--type=merge", "-p", json.dumps(scaling))
    selector = "serving.leadline.io/service=smollm2"
    seconds = here.namespace.until("the pod is gone", lambda: not here.namespace.items("pods", selector), 120)
    assert ready(here.namespace, "smollm2")["reason"] == "Asleep"
    print(f"asleep {seconds:.1f} s after the last request; idleSeconds is 10")
    began = time.monotonic()
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(ask, here.gateway, "smollm2") for _ in range(3)]
        here.namespace.until("it is woken", lambda: here.namespace.items("pods", selector), 20)
        print(f"a pod {time.monotonic() - began:.1f} s after the request that wakes the service")
        assert all("Paris" in one.result() for one in asked)
    print(f"answered {time.monotonic() - began:.1f} s after the request that wakes the service")


def writes_nothing(system: Namespace) -> None:
    """Row P1, counted at the API server: over five resyncs the operator writes nothing but its Lease."""
    audit = Audit(f"system:serviceaccount:{system.name}:r-leadline-operator")

    def resyncs(start: int) -> int:
        about = [(one["verb"], one["objectRef"]["resource"]) for one in audit.events()[start:]]
        return about.count(("list", "inferenceservices"))

    start = len(audit.events())
    system.until("it looks twice more", lambda: resyncs(start) >= 2, 60)
    start = len(audit.events())
    system.until("it looks five times more", lambda: resyncs(start) >= 5, 60)
    writes = [
        (one["verb"], one["objectRef"]["resource"], one["objectRef"].get("name"))
        for one in audit.events()[start:]
        if one["verb"] not in ("get", "list", "watch") and one["objectRef"]["resource"] != "leases"
    ]
    assert not writes, "written at steady state"


NAMES = (
    "HuggingFaceTB/SmolLM2-135M.Instruct:模型-" + "x" * 63,
    "HuggingFaceTB/SmolLM2-135M",
    "Псевдоним." + "y" * 200,
)


def from_claim() -> list[dict[str, Any]]:
    """The sample, but that its model has names which Kubernetes would not take for anything."""
    documents: list[dict[str, Any]] = list(
        yaml.safe_load_all((SAMPLES / "model-from-claim.yaml").read_text())
    )
    spec = documents[-1]["spec"]
    assert spec["servedName"] == "SmolLM2-135M-Instruct"
    spec["servedName"], spec["aliases"] = NAMES[0], list(NAMES[1:])
    spec["rollout"] = {"maxSurge": 1, "maxUnavailable": 0}
    return documents


@pytest.fixture(scope="module")
def claimed(installed: Installed) -> Installed:
    installed.namespace.apply(from_claim())
    print(f"Ready {until_ready(installed, 'from-claim'):.1f} s after the apply, the claim filled meanwhile")
    return installed


def test_a_model_in_a_claim_that_a_job_fills_is_served_under_any_name(claimed: Installed) -> None:
    """Row P17: what clients call the model need not be a name that Kubernetes would take."""
    for name in NAMES:
        assert "Paris" in ask(claimed.gateway, name)


def test_a_folder_that_the_container_has_is_served(claimed: Installed) -> None:
    """`file://`. The folder comes from the claim, as if an image had brought it."""
    volume = {"name": "more", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
    mount = {"name": "more", "mountPath": "/srv/models", "readOnly": True}
    pod = {"volumes": [volume], "containers": [{"name": "engine", "volumeMounts": [mount]}]}
    spec = {
        "model": "file:///srv/models/smollm2",
        "accelerator": {"type": "cpu"},
        "engine": {"maxModelLen": 256},
        "podTemplate": {"spec": pod},
    }
    service = {"apiVersion": "serving.leadline.io/v1alpha1", "kind": "InferenceService", "spec": spec}
    claimed.namespace.apply([{**service, "metadata": {"name": "folder"}}])
    until_ready(claimed, "folder")
    assert "Paris" in ask(claimed.gateway, "folder")
    claimed.namespace.kubectl("delete", "isvc", "folder", "--wait=true")


def test_a_rollout_of_engines_cuts_no_stream(claimed: Installed) -> None:
    """Row P8: a pod that is to go gets no new requests, and finishes those that it has."""
    namespace, selector = claimed.namespace, "serving.leadline.io/service=from-claim"
    (before,) = (one["metadata"]["name"] for one in namespace.items("pods", selector))
    load = Load(claimed.gateway, NAMES[0], threads=2, seconds=5)
    try:
        namespace.until("streams come", lambda: len(load.streams) >= 2)
        (changed,) = (one for one in from_claim() if one["kind"] == "InferenceService")
        changed["spec"]["engine"]["maxModelLen"] = 1024
        namespace.apply([changed])
        seconds = namespace.until("the old pod is gone", lambda: not namespace.get("pod", before), 300)
        print(f"the old pod was gone {seconds:.1f} s after the change")
        gone, seen = time.monotonic(), len(load.streams)
        namespace.until("the new pod answers", lambda: len(load.streams) >= seen + 3)
    finally:
        streams = load.stop()
    print(f"{len(streams)} streams, {sum(one.pieces for one in streams)} pieces")
    assert [one for one in streams if one.error or one.finish != "length"] == []
    assert sum(one.began > gone for one in streams) >= 1
    (after,) = (one["metadata"]["name"] for one in namespace.items("pods", selector))
    assert after != before
