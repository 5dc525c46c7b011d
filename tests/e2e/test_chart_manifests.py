"""`kubectl apply -k manifests` on a real cluster: what helm gives, without helm."""

from __future__ import annotations

import json
import os
import shutil
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml
from real_cluster import ROOT, Cluster, Namespace, own_images

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

DEPLOYMENTS = ("leadline-gateway", "leadline-operator", "leadline-valkey")


def copy(folder: Path, namespace: str) -> tuple[Path, Path]:
    """The manifests for a namespace of the test's own and the images of this cluster: (all, all but the CRD).
    Where others work with InferenceServices too, the operator looks at that namespace only."""
    whole, without = folder / "manifests", folder / "without-crd"
    shutil.copytree(ROOT / "manifests", whole)
    for file in whole.iterdir():
        if file.suffix in (".yaml", ".env"):
            file.write_text(file.read_text().replace("leadline-system", namespace))
    documents: list[dict[str, Any]] = own_images(
        list(yaml.safe_load_all((whole / "leadline.yaml").read_text()))
    )
    for document in documents:
        name = (document["kind"], document["metadata"]["name"])
        if name == ("Deployment", "leadline-operator") and os.environ.get("LEADLINE_E2E_SHARED"):
            document["spec"]["template"]["spec"]["containers"][0]["args"].append(f"--namespace={namespace}")
        if name == ("Service", "leadline-gateway"):
            document["spec"]["type"] = "NodePort"
    (whole / "leadline.yaml").write_text(yaml.safe_dump_all(documents))
    shutil.copytree(whole, without)
    described = yaml.safe_load((without / "kustomization.yaml").read_text())
    described["resources"].remove("crd.yaml")
    (without / "kustomization.yaml").write_text(yaml.safe_dump(described))
    return whole, without


def versions(namespace: Namespace) -> dict[str, str]:
    """Kind and name → what changes with every write; of what has a status, with every write to its spec."""
    selector = "app.kubernetes.io/name=leadline"
    return {
        f"{one['kind']}/{one['metadata']['name']}": str(
            one["metadata"].get("generation") or one["metadata"]["resourceVersion"]
        )
        for one in namespace.items(
            "deployments,services,configmaps,networkpolicies,serviceaccounts", selector
        )
    } | {"Secret": str((namespace.get("secret", "leadline-redis") or {})["metadata"]["resourceVersion"])}


def test_apply_of_the_manifests_makes_an_operator_that_acts_and_a_gateway_that_answers(
    cluster: Cluster, tmp_path: Path
) -> None:
    namespace = Namespace(cluster, f"kustomize-{uuid.uuid4().hex[:6]}")
    whole, without_crd = copy(tmp_path, namespace.name)
    try:
        cluster.kubectl("apply", "-k", str(whole))
        for name in DEPLOYMENTS:
            namespace.rolled_out(name, 120)
        service = {
            "apiVersion": "serving.leadline.io/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "m"},
            "spec": {"model": "smollm2", "replicas": 0},
        }
        namespace.kubectl("create", "-f", "-", text=json.dumps(service))

        def url() -> str | None:
            status: dict[str, Any] = (namespace.get("isvc", "m") or {}).get("status", {})
            return status.get("url")

        namespace.until("the operator takes the service up", url, 60)
        assert url() == f"http://leadline-gateway.{namespace.name}/v1"
        assert namespace.get("deployment", "m-engine")
        with urllib.request.urlopen(
            namespace.node_port("leadline-gateway") + "/v1/models", timeout=10
        ) as got:
            assert json.load(got)["object"] == "list"
        log = namespace.kubectl("logs", "deployment/leadline-operator")
        assert "forbidden" not in log.lower(), log
        gateway = namespace.kubectl("logs", "deployment/leadline-gateway")
        assert "counting in Redis" in gateway, "the password of redis.env is the one that Valkey asks for"

        # Again, as after a change in the repository: nothing is written, nothing replaced. (kubectl says
        # "configured" of some, whose empty fields the API server leaves out.)
        before = versions(namespace)
        cluster.kubectl("apply", "-k", str(without_crd))
        assert versions(namespace) == before
        namespace.kubectl("delete", "isvc", "m", "--wait=true", "--timeout=60s")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{namespace.describe()}") from None
    finally:
        # The CRD stays: all releases share it.
        cluster.kubectl(
            "delete", "-k", str(without_crd), "--wait=true", "--timeout=120s", "--ignore-not-found"
        )
    label = "app.kubernetes.io/instance=leadline,app.kubernetes.io/part-of=leadline"
    roles = json.loads(cluster.kubectl("get", "clusterroles,clusterrolebindings", "-l", label, "-o", "json"))
    assert not [one for one in roles["items"] if one["metadata"]["name"].startswith(f"{namespace.name}:")]
