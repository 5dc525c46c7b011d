"""Six lines of YAML to an answer: chart, operator, engine, gateway, and nothing left afterwards."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest
from real_cluster import ROOT, Cluster, Namespace, values_here

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


def test_six_lines_answer_a_chat_and_deleting_them_leaves_nothing(cluster: Cluster) -> None:
    with (
        cluster.namespace("system") as system,
        cluster.namespace("llm") as namespace,
        system.release("r", values_here(), serves=(namespace,)) as seconds,
    ):
        print(f"chart installed and ready in {seconds:.1f} s")
        gateway = system.node_port("r-leadline-gateway")

        began = time.monotonic()
        namespace.apply((SAMPLES / "smollm2.yaml").read_text())
        try:
            namespace.until("Ready is True", lambda: ready(namespace, "smollm2").get("status") == "True", 300)
        except AssertionError as error:
            raise AssertionError(f"{error}\n-- the chart's namespace\n{system.describe()}") from None
        seconds = time.monotonic() - began
        print(f"Ready {seconds:.1f} s after the apply: {ready(namespace, 'smollm2')['message']}")
        print(namespace.kubectl("get", "isvc"))
        assert "Paris" in ask(gateway, "smollm2")
        print(f"answered {time.monotonic() - began:.1f} s after the apply")

        # NetworkPolicy: the engine answers the gateway's pods and nobody else's.
        address = namespace.items("pods", "serving.leadline.io/service=smollm2")[0]["status"]["podIP"]
        health = f"http://{address}:8000/health"
        assert namespace.python("stranger", ASK, health, "5").strip() == "no answer"
        assert system.python("neighbour", ASK, health, "5").strip() == "no answer"
        gateways = {"app.kubernetes.io/instance": "r", "app.kubernetes.io/component": "gateway"}
        assert system.python("as-gateway", ASK, health, "20", labels=gateways).strip() == "200"
        url = (namespace.get("isvc", "smollm2") or {})["status"]["url"]
        assert namespace.python("client", ASK, f"{url}/models", "20").strip() == "200"

        log = system.kubectl("logs", "deployment/r-leadline-operator")
        assert "forbidden" not in log.lower(), log

        began = time.monotonic()
        namespace.kubectl("delete", "isvc", "smollm2", "--wait=true", "--timeout=60s")
        selector = "serving.leadline.io/service=smollm2"
        namespace.until("nothing is left", lambda: not namespace.items(CHILDREN, selector), 120)
        print(f"nothing left {time.monotonic() - began:.1f} s after the delete")


def test_a_model_in_a_claim_that_a_job_fills_is_served_under_its_name(cluster: Cluster) -> None:
    with (
        cluster.namespace("system") as system,
        cluster.namespace("llm") as namespace,
        system.release("r", values_here(), serves=(namespace,)),
    ):
        namespace.apply((SAMPLES / "model-from-claim.yaml").read_text())
        seconds = namespace.until(
            "Ready is True", lambda: ready(namespace, "from-claim").get("status") == "True", 400
        )
        print(f"Ready {seconds:.1f} s after the apply, the claim filled meanwhile")
        assert "Paris" in ask(system.node_port("r-leadline-gateway"), "SmolLM2-135M-Instruct")
