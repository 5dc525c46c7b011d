"""The chart without a cluster: what it renders, refuses and keeps equal to what it was made from.

helm is needed, on PATH or beside the kubeconfig: where there is no cluster, only the CRD's copy is compared.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from real_cluster import CHART, ROOT, Cluster

EVERYTHING = {
    "gateway": {
        "replicas": 3,
        "keysSecret": "keys",
        "config": {"policy": "least-load"},
        "ingress": {"enabled": True, "hosts": ["llm.example.org"], "tlsSecret": "tls", "className": "nginx"},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["llm.example.org"]},
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
    },
    "operator": {"replicas": 2},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "commonLabels": {"team": "llm"},
    "commonAnnotations": {"note": "x"},
    "imagePullSecrets": ["registry"],
}
MODES = {
    "defaults": {},
    "namespaced": {"namespaced": True},
    "everything": EVERYTHING,
    "external": {"valkey": {"enabled": False}, "externalRedis": {"url": "rediss://:p@redis:6379/0"}},
    "existing secret": {"valkey": {"enabled": False}, "externalRedis": {"existingSecret": "mine"}},
    "no redis": {"valkey": {"enabled": False}},
    "gateway only": {"operator": {"enabled": False}, "crds": {"install": False}},
}


def test_the_charts_crd_is_the_one_made_from_the_types() -> None:
    made, copied = (ROOT / "manifests" / "crd.yaml").read_text(), (CHART / "files" / "crd.yaml").read_text()
    assert made == copied, "run `make manifests`"


@pytest.mark.cluster
def test_the_plain_manifests_are_those_of_the_chart(cluster: Cluster) -> None:
    text = (ROOT / "manifests" / "leadline.yaml").read_text()
    assert cluster.tool(sys.executable, str(ROOT / "manifests" / "render.py"), "--print") == text, (
        "run `make manifests`"
    )
    built = [one for one in yaml.safe_load_all(cluster.kubectl("kustomize", str(ROOT / "manifests"))) if one]
    kinds = {one["kind"] for one in built}
    assert kinds >= {"CustomResourceDefinition", "Namespace", "Secret", "Deployment", "NetworkPolicy"}
    assert {one["metadata"].get("namespace", "leadline-system") for one in built} == {"leadline-system"}


def render(cluster: Cluster, folder: Path, values: dict[str, Any], name: str = "r") -> list[dict[str, Any]]:
    file = folder / "values.json"
    file.write_text(json.dumps(values))
    text = cluster.helm("template", name, str(CHART), "--namespace", "system", "--values", str(file))
    return [document for document in yaml.safe_load_all(text) if document]


def pods(documents: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """(name, pod spec) of everything that makes pods."""
    found = []
    for document in documents:
        if document["kind"] in ("Deployment", "Job"):
            found.append((document["metadata"]["name"], document["spec"]["template"]["spec"]))
        elif document["kind"] == "Pod":
            found.append((document["metadata"]["name"], document["spec"]))
    return found


@pytest.mark.cluster
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_lints_and_renders_restricted_pods(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(MODES[mode]))
    cluster.helm("lint", "--strict", "--values", str(file), str(CHART))
    documents = render(cluster, tmp_path, MODES[mode])
    assert documents
    for name, spec in pods(documents):
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert container["resources"]["requests"], name
            assert container["resources"]["limits"]["memory"], name
    seen = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(seen) == len(set(seen)), "two objects of one name"
    if mode != "gateway only":
        assert any(kind == "CustomResourceDefinition" for kind, _ in seen)


@pytest.mark.cluster
def test_the_namespaced_mode_asks_for_no_right_outside_its_namespace(
    cluster: Cluster, tmp_path: Path
) -> None:
    documents = render(cluster, tmp_path, MODES["namespaced"])
    assert not [one for one in documents if one["kind"] in ("ClusterRole", "ClusterRoleBinding")]
    everywhere = {
        one["metadata"].get("namespace") for one in documents if one["kind"] != "CustomResourceDefinition"
    }
    assert everywhere == {"system"}


@pytest.mark.cluster
def test_no_role_has_a_wildcard_and_none_reads_secrets(cluster: Cluster, tmp_path: Path) -> None:
    for document in render(cluster, tmp_path, {}):
        for rule in document.get("rules", []) if "Role" in document["kind"] else []:
            assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"], document["metadata"][
                "name"
            ]


@pytest.mark.cluster
def test_two_releases_share_no_name_but_that_of_the_crd(cluster: Cluster, tmp_path: Path) -> None:
    first, second = (
        {(one["kind"], one["metadata"]["name"]) for one in render(cluster, tmp_path, {}, name)}
        for name in ("first", "second")
    )
    assert {kind for kind, _ in first & second} == {"CustomResourceDefinition"}


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"gatway": {}}, "gatway"),
        ({"gateway": {"replicas": "three"}}, "replicas"),
        ({"gateway": {"service": {"type": "Nodeport"}}}, "service/type"),
        ({"engine": {"accelerator": "tpu"}}, "accelerator"),
        ({"externalRedis": {"url": "redis://x:6379"}}, "set valkey.enabled to false"),
        ({"gateway": {"ingress": {"enabled": True}}}, "must name a host"),
    ],
)
def test_wrong_values_are_refused_with_a_sentence(
    cluster: Cluster, tmp_path: Path, values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(AssertionError, match=sentence):
        render(cluster, tmp_path, values)
